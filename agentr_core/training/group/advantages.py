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
    """Return whether the rewards of a group differ, so that there is anything to learn from it."""
    return len(set(rewards)) > 1


def advantages(rewards: Sequence[float], *, scale: ScaleRewards) -> list[float]:
    """Return each reward minus the mean of its group, in units of reward or of the group's sample
    standard deviation plus 1e-4.

    All are 0 in a group without contrast. Sources: arXiv 2402.03300 (`group`), 2503.20783 (`none`).
    """
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    mean, unit = fmean(rewards), _unit(rewards, scale)
    return [(reward - mean) / unit for reward in rewards]


def sibling_advantages(
    episodes: Sequence[Trajectory], rewards: Sequence[float], *, scale: ScaleRewards
) -> list[list[float]]:
    """Return the advantage of each step of each episode of a group, in the units of `advantages`.
    `rewards` are those of the episodes.

    The group is a tree: a state is the sequence of actions and observations up to it, and its value
    V is the mean reward of the episodes that act in it. The advantage of a step is the mean reward
    of the episodes that took its action in its state, minus V of the state. If all of them took the
    same action, nothing was chosen, and the step has the advantage of the choice before it. In a
    world that repeats itself, where no episode ends in a state in which others act, the advantages
    of the choices that lead to an episode's end sum to its reward minus the mean of the group.
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
    own, each times its weight.

    Its own compares its worth, by `advantages`, with those of the other steps in its state; it is 0
    if no other has one.

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
    """Return the worth of each step of episodes with `sizes` steps to GiGPO (arXiv 2505.10978): the
    reward of its episode times `discount` to the power of the number of steps after it.
    """
    return [
        [reward * discount ** (size - 1 - step) for step in range(size)]
        for reward, size in zip(rewards, sizes, strict=True)
    ]


# Actions, since thoughts hardly ever agree; observations too, so that a choice gets no credit for
# luck in the world.
def _path(episode: Trajectory) -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Return the state and the choice of each step: the pairs of action and observation before the
    step, and those pairs with its action.
    """
    pairs = [(step.action, step.observation) for step in episode.steps]
    return [((*pairs[:index],), (*pairs[:index], action)) for index, (action, _) in enumerate(pairs)]


def _unit(rewards: Sequence[float], scale: ScaleRewards) -> float:
    return stdev(rewards) + _LEAST_DEVIATION if scale == "group" else 1.0


# How far each state of an instance is from a reward: the graph of the transitions that episodes
# made. States are told apart by keys (`rollout.state_key`), and a step is an edge from the state in
# which it was taken to the next one. Source: GraphGPO (arXiv 2605.26684), whose rewards are 0 or 1.


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
    furthest: float
    """The worth of a state from which no reward can be reached."""
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
        return cls(worths, led_to, discount * min(worths.values(), default=0.0), discount)

    def worth(self, edge: Edge) -> float | None:
        """Return the worth of an edge, in [0, 1]; None if it is not known where it leads to, and no
        other edge of its state has its action.
        """
        if edge.next_state is None and edge.reward is None:
            known_edge = self.led_to.get((edge.state, edge.action))
            return None if known_edge is None else self.worth(known_edge)
        if edge.reward is not None and edge.reward > 0:
            return self.discount * edge.reward
        after = None if edge.next_state is None else self.worths.get(edge.next_state)
        return self.discount * (self.furthest if after is None else after)

    def is_nearer(self, edge: Edge) -> bool | None:
        """Return whether an edge is a first step of a best way to a reward; None if that is not
        known, or no reward can be reached from its state.
        """
        worth = self.worth(edge)
        if worth is None or edge.state not in self.worths:
            return None
        return worth >= self.worths[edge.state]
