"""How far each state of an instance is from a reward: the graph of the transitions that episodes
made.

States are told apart by keys (`rollout.state_key`), and a step is an edge from the state in which
it was taken to the next one. Source: GraphGPO (arXiv 2605.26684), whose rewards are 0 or 1.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentr_core.errors import DataFault
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.grpo import StateKey
from agentr_core.types import Trajectory


class Edge(NamedTuple):
    """One step: from `state` by `action` to `next_state`, or to an end of the episode with a
    `reward`, of which one below 0 counts as none. Both are None where a limit cut the episode
    without a reward, so that it is not known where the step led to.
    """

    state: str
    action: str
    next_state: str | None
    reward: float | None

    @classmethod
    def of_step(
        cls, state: str, action: str, next_state: str | None, *, ended: bool, terminated: bool, reward: float
    ) -> Edge:
        """Return the edge of a step. Where its episode `ended` without a reward and the world had
        not `terminated` it, a limit cut it.
        """
        if not ended:
            return cls(state, action, next_state, None)
        return cls(state, action, None, reward if terminated or reward > 0 else None)


def edges_of(trajectory: Trajectory, reward: float, *, key: StateKey) -> list[Edge]:
    """Return the edge of each step of an episode with a reward.

    With key `observation`, a state is the last observation, and nothing is known of what it hides.
    Raises `DataFault` with key `world` if a step has no state key.
    """
    steps = trajectory.steps
    if key == "observation":
        states = [fingerprint(text) for text in (trajectory.first_observation, *(s.observation for s in steps))]
    else:
        states = [step.state_key for step in steps if step.state_key is not None]
        if len(states) < len(steps):
            raise DataFault(
                f"an episode of {trajectory.instance.key} was stored without the states of its steps; begin a new run, "
                "or set grpo.states.key to observation"
            )
    return [
        Edge.of_step(
            states[at],
            step.action,
            None if at + 1 == len(steps) else states[at + 1],
            ended=at + 1 == len(steps),
            terminated=step.terminated,
            reward=reward,
        )
        for at, step in enumerate(steps)
    ]


class Agreement(NamedTuple):
    """Of the edges between two states whose action an earlier edge took in the same state: their
    number, and how many of them led to another state.
    """

    pairs: int
    conflicts: int

    def plus(self, other: Agreement) -> Agreement:
        """Return the sums of two."""
        return Agreement(self.pairs + other.pairs, self.conflicts + other.conflicts)

    @classmethod
    def of(cls, edges: Iterable[Edge]) -> Agreement:
        """Return how well keys tell the states of an instance apart."""
        first: dict[tuple[str, str], str] = {}
        pairs = conflicts = 0
        for state, action, next_state, _ in edges:
            if next_state is None:
                continue
            if (state, action) in first:
                pairs += 1
                conflicts += first[state, action] != next_state
            else:
                first[state, action] = next_state
        return cls(pairs, conflicts)


@dataclass(frozen=True, slots=True)
class StateGraph:
    """The worth of the states of one instance.

    The worth of a state is the largest, over all ends that can be reached from it, of the reward
    there times `discount` to the power of the least number of steps to it; that of an edge is the
    worth of what it leads to times `discount`, an end being worth its reward. A state from which no
    reward can be reached counts as one step further away than the worst from which one can.
    """

    worths: Mapping[str, float]
    """By state; only states from which a reward can be reached."""
    led_to: Mapping[tuple[str, str], Edge]
    """The first edge of each state and action of which it is known where it led to."""
    discount: float

    @classmethod
    def of(cls, edges: Sequence[Edge], *, discount: float) -> StateGraph:
        """Return the graph of edges; `discount` is in (0, 1)."""
        entered_from: defaultdict[str, list[str]] = defaultdict(list)
        led_to: dict[tuple[str, str], Edge] = {}
        # States by worth, the largest first.
        queue: list[tuple[float, str]] = []
        for edge in edges:
            if edge.next_state is not None:
                entered_from[edge.next_state].append(edge.state)
            elif edge.reward is not None and edge.reward > 0:
                queue.append((-discount * edge.reward, edge.state))
            if edge.next_state is not None or edge.reward is not None:
                led_to.setdefault((edge.state, edge.action), edge)
        heapq.heapify(queue)
        worths: dict[str, float] = {}
        while queue:
            negative, state = heapq.heappop(queue)
            if state in worths:
                continue
            worths[state] = -negative
            for before in entered_from[state]:
                if before not in worths:
                    heapq.heappush(queue, (discount * negative, before))
        return cls(worths, led_to, discount)

    def worth(self, edge: Edge) -> float | None:
        """Return the worth of an edge, in [0, 1]; None if it is not known where it leads to, and no
        other edge of its state has its action.
        """
        if edge.next_state is None and edge.reward is None:
            known = self.led_to.get((edge.state, edge.action))
            return None if known is None else self.worth(known)
        if edge.reward is not None and edge.reward > 0:
            return self.discount * edge.reward
        furthest = self.discount * min(self.worths.values(), default=0.0)
        after = furthest if edge.next_state is None else self.worths.get(edge.next_state, furthest)
        return self.discount * after

    def is_nearer(self, edge: Edge) -> bool | None:
        """Return whether an edge is a first step of a best way to a reward; None if that is not
        known, or no reward can be reached from its state.
        """
        worth = self.worth(edge)
        if worth is None or edge.state not in self.worths:
            return None
        return worth >= self.worths[edge.state]
