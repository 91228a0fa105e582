"""The advantages of episodes, or of their steps, relative to the others of their group."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from agentr_core.errors import DataFault
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.grpo import ScaleRewards, StateKey, StatesConfig
from agentr_core.types import Trajectory

_LEAST_DEVIATION = 1e-4
"""Added to a standard deviation, as TRL does."""


def has_contrast(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ; without contrast there is nothing to learn from
    it.
    """
    return len(set(rewards)) > 1


def advantages(rewards: Sequence[float], *, scale: ScaleRewards) -> list[float]:
    """Return each reward minus the mean of its group; with scale `group`, divided by the group's
    sample standard deviation plus 1e-4.

    All are 0 in a group without contrast. Sources: arXiv 2402.03300 (`group`), 2503.20783 (`none`).
    """
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    mean, unit = fmean(rewards), _unit(rewards, scale)
    return [(reward - mean) / unit for reward in rewards]


def sibling_advantages(
    episodes: Sequence[Trajectory], rewards: Sequence[float], *, scale: ScaleRewards
) -> list[list[float]]:
    """Return the advantage of each step of each episode of a group, scaled as by `advantages`.
    `rewards` are those of the episodes.

    The group is a tree: a state is the sequence of actions and observations up to it, and its value
    V is the mean reward of the episodes that act in it. The advantage of a step is the mean reward
    of the episodes that took its action in its state, minus V of the state. If all of them took the
    same action, nothing was chosen, and the step has the advantage of the choice before it. In a
    deterministic environment, where no episode ends in a state in which others act, the (unscaled)
    advantages of the choices that lead to an episode's end sum to its reward minus the mean of the
    group.
    """
    if not has_contrast(rewards):
        return [[0.0] * len(episode.steps) for episode in episodes]
    unit = _unit(rewards, scale)
    through: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for episode, reward in zip(episodes, rewards, strict=True):
        for state, choice in _path(episode):
            through[state].append(reward)
            through[choice].append(reward)
    by_episode: list[list[float]] = []
    for episode in episodes:
        difference, of_steps = 0.0, []
        for state, choice in _path(episode):
            if len(through[choice]) < len(through[state]):
                difference = fmean(through[choice]) - fmean(through[state])
            of_steps.append(difference)
        by_episode.append(of_steps)
    return [[advantage / unit for advantage in of_steps] for of_steps in by_episode]


def state_advantages(
    states: Sequence[Sequence[str]],
    worths: Sequence[Sequence[float | None]],
    of_episodes: Sequence[float],
    *,
    config: StatesConfig,
    scale: ScaleRewards,
) -> list[list[float]]:
    """Return the advantage of each step of each episode of a group: that of its episode and its
    own, each times its weight in `config`.

    Its own compares its worth, by `advantages`, with the worths of the other steps in the same
    state; it is 0 if no other step there has one.

    Args:
        states: the keys of the states in which the steps of each episode were taken.
        worths: the worths of the steps of each episode; None for steps that are not compared.
        of_episodes: the advantage of each episode.
    """
    in_state: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for episode, keys in enumerate(states):
        for step, key in enumerate(keys):
            if worths[episode][step] is not None:
                in_state[key].append((episode, step))
    by_episode = [
        [config.episode_weight * advantage] * len(keys) for advantage, keys in zip(of_episodes, states, strict=True)
    ]
    for steps in in_state.values():
        step_worths = [worth for episode, step in steps if (worth := worths[episode][step]) is not None]
        for (episode, step), advantage in zip(steps, advantages(step_worths, scale=scale), strict=True):
            by_episode[episode][step] += config.weight * advantage
    return by_episode


def discounted_rewards(rewards: Sequence[float], sizes: Sequence[int], *, discount: float) -> list[list[float]]:
    """Return the worth of each step of each episode, as GiGPO (arXiv 2505.10978) defines it: the
    reward of the episode times `discount` to the power of the number of steps after it. `sizes` are
    the numbers of steps of the episodes.
    """
    return [
        [reward * discount ** (size - 1 - step) for step in range(size)]
        for reward, size in zip(rewards, sizes, strict=True)
    ]


# Compare actions, since thoughts hardly ever agree; and observations too, so that a choice gets no
# credit for luck in the environment.
def _path(episode: Trajectory) -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Return for each step its state and its choice: the state is the pairs of action and
    observation before the step, the choice is these pairs and the step's action.
    """
    pairs = [(step.action, step.observation) for step in episode.steps]
    return [((*pairs[:index],), (*pairs[:index], action)) for index, (action, _) in enumerate(pairs)]


def _unit(rewards: Sequence[float], scale: ScaleRewards) -> float:
    return stdev(rewards) + _LEAST_DEVIATION if scale == "group" else 1.0


# How far each state of an instance is from a reward: the graph of the transitions in its episodes.
# States are told apart by keys (`Step.state_key`), and a step is an edge from the state in which it
# was taken to the next one. Source: GraphGPO (arXiv 2605.26684), whose rewards are 0 or 1.


class Edge(NamedTuple):
    """One step, as an edge of the graph: from `state` by `action` to `next_state`, or to the end of
    the episode with `reward`.

    One of these two is None; both are None where a limit cut the episode without a reward, so that
    it is unknown where the step led. A reward below 0 counts as 0.
    """

    state: str
    action: str
    next_state: str | None
    reward: float | None

    @classmethod
    def of_step(
        cls, state: str, action: str, next_state: str | None, *, ended: bool, terminated: bool, reward: float
    ) -> Edge:
        """Return the edge of a step. If its episode `ended` with it, without a reward and without
        being `terminated` by the environment, a limit cut the episode.
        """
        if not ended:
            return cls(state, action, next_state, None)
        return cls(state, action, None, reward if terminated or reward > 0 else None)


def edges_of(trajectory: Trajectory, reward: float, *, key: StateKey) -> list[Edge]:
    """Return the edge of each step of an episode, in order; `reward` is that of the episode.

    With key `observation`, a state is identified by the last observation alone, so states that look
    alike are the same. Raises `DataFault` with key `world` if a step has no state key.
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
    """A test of how well keys tell states apart. `pairs` counts the edges between two states whose
    state and action an earlier edge had; `conflicts` counts those of them that led to another state
    than the first such edge.
    """

    pairs: int
    conflicts: int

    def plus(self, other: Agreement) -> Agreement:
        """Return the sums of two."""
        return Agreement(self.pairs + other.pairs, self.conflicts + other.conflicts)

    @classmethod
    def of(cls, edges: Iterable[Edge]) -> Agreement:
        """Return the agreement among the edges of an instance."""
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
    there times `discount` to the power of the least number of steps to that end. The worth of an
    edge is `discount` times the worth of what it leads to; the worth of an end is its reward. A
    state from which no reward can be reached counts as one step further away than the worst state
    from which one can.
    """

    worths: Mapping[str, float]
    """Worth by state; only states from which a reward can be reached."""
    led_to: Mapping[tuple[str, str], Edge]
    """The first edge with a known target, by state and action."""
    furthest: float
    """The worth of a state from which no reward can be reached."""
    discount: float

    @classmethod
    def of(cls, edges: Sequence[Edge], *, discount: float) -> StateGraph:
        """Return the graph of the edges of an instance; `discount` is in (0, 1)."""
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
        return cls(worths, led_to, discount * min(worths.values(), default=0.0), discount)

    def worth(self, edge: Edge) -> float | None:
        """Return the worth of an edge, in [0, 1] for rewards up to 1. For an edge with an unknown
        target, it is that of the first edge with the same state and action; None if there is none.
        """
        if edge.next_state is None and edge.reward is None:
            known_edge = self.led_to.get((edge.state, edge.action))
            return None if known_edge is None else self.worth(known_edge)
        if edge.reward is not None and edge.reward > 0:
            return self.discount * edge.reward
        after = None if edge.next_state is None else self.worths.get(edge.next_state)
        return self.discount * (self.furthest if after is None else after)

    def is_nearer(self, edge: Edge) -> bool | None:
        """Return whether an edge begins a best path from its state to a reward; None if its target
        is unknown, or no reward can be reached from its state.
        """
        worth = self.worth(edge)
        if worth is None or edge.state not in self.worths:
            return None
        return worth >= self.worths[edge.state]
