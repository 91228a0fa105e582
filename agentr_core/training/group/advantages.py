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
from agentr_core.types import StopReason, Trajectory

_DEVIATION_OFFSET = 1e-4
"""Added to a standard deviation, as TRL does."""


def has_contrast(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ; without contrast there is nothing to learn from
    it.
    """
    return len(set(rewards)) > 1


def group_advantages(rewards: Sequence[float], *, scale: ScaleRewards) -> list[float]:
    """Return each reward minus the mean of its group; with scale `group`, divided by the group's
    sample standard deviation plus 1e-4.

    All are 0 in a group without contrast. Sources: arXiv 2402.03300 (`group`), 2503.20783 (`none`).
    """
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    mean, divisor = fmean(rewards), _divisor(rewards, scale)
    return [(reward - mean) / divisor for reward in rewards]


def sibling_advantages(
    episodes: Sequence[Trajectory], rewards: Sequence[float], *, scale: ScaleRewards
) -> list[list[float]]:
    """Return the advantage of each step of each episode of a group, scaled as by
    `group_advantages`. `rewards` are those of the episodes.

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
    divisor = _divisor(rewards, scale)
    rewards_by_prefix: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for episode, reward in zip(episodes, rewards, strict=True):
        for state, choice in _states_and_choices(episode):
            rewards_by_prefix[state].append(reward)
            rewards_by_prefix[choice].append(reward)
    advantages_by_episode: list[list[float]] = []
    for episode in episodes:
        advantage, step_advantages = 0.0, []
        for state, choice in _states_and_choices(episode):
            if len(rewards_by_prefix[choice]) < len(rewards_by_prefix[state]):
                advantage = fmean(rewards_by_prefix[choice]) - fmean(rewards_by_prefix[state])
            step_advantages.append(advantage)
        advantages_by_episode.append(step_advantages)
    return [[advantage / divisor for advantage in step_advantages] for step_advantages in advantages_by_episode]


def state_advantages(
    states: Sequence[Sequence[str]],
    values: Sequence[Sequence[float | None]],
    episode_advantages: Sequence[float],
    *,
    config: StatesConfig,
    scale: ScaleRewards,
) -> list[list[float]]:
    """Return the advantage of each step of each episode of a group: that of its episode and its
    own, each times its weight in `config`.

    Its own compares its value, by `group_advantages`, with the values of the other steps in the
    same state; it is 0 if no other step there has one.

    Args:
        states: the keys of the states in which the steps of each episode were taken.
        values: the values of the steps of each episode; None for steps that are not compared.
        episode_advantages: the advantage of each episode.
    """
    steps_by_state: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for episode, state_keys in enumerate(states):
        for step, key in enumerate(state_keys):
            if values[episode][step] is not None:
                steps_by_state[key].append((episode, step))
    advantages_by_episode = [
        [config.episode_weight * advantage] * len(state_keys)
        for advantage, state_keys in zip(episode_advantages, states, strict=True)
    ]
    for steps in steps_by_state.values():
        step_values = [value for episode, step in steps if (value := values[episode][step]) is not None]
        for (episode, step), advantage in zip(steps, group_advantages(step_values, scale=scale), strict=True):
            advantages_by_episode[episode][step] += config.weight * advantage
    return advantages_by_episode


def discounted_rewards(
    rewards: Sequence[float], num_steps_by_episode: Sequence[int], *, discount: float
) -> list[list[float]]:
    """Return the value of each step of each episode, as GiGPO (arXiv 2505.10978) defines it: the
    reward of the episode times `discount` to the power of the number of steps after it.
    `num_steps_by_episode` has the number of steps of each episode.
    """
    return [
        [reward * discount ** (num_steps - 1 - step) for step in range(num_steps)]
        for reward, num_steps in zip(rewards, num_steps_by_episode, strict=True)
    ]


# Compare actions, since thoughts hardly ever agree; and observations too, so that a choice gets no
# credit for luck in the environment.
def _states_and_choices(episode: Trajectory) -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Return for each step its state and its choice: the state is the pairs of action and
    observation before the step, the choice is these pairs and the step's action.
    """
    pairs = [(step.action, step.observation) for step in episode.steps]
    return [((*pairs[:index],), (*pairs[:index], action)) for index, (action, _) in enumerate(pairs)]


def _divisor(rewards: Sequence[float], scale: ScaleRewards) -> float:
    return stdev(rewards) + _DEVIATION_OFFSET if scale == "group" else 1.0


# How far each state of an instance is from a reward: the graph of the transitions in its episodes.
# States are told apart by keys (`Step.state_key`), and a step is an edge from the state in which it
# was taken to the next one. Source: GraphGPO (arXiv 2605.26684), whose rewards are 0 or 1.


class Edge(NamedTuple):
    """One step, as an edge of the graph: from `state` by `action` to `next_state`, or to the end of
    the episode with `reward`.

    One of these two is None; both are None where a limit cut the episode without a reward, so that
    it is unknown where the step led: a limit of the world's as well as one of the recipe's. A
    reward below 0 counts as 0.
    """

    state: str
    action: str
    next_state: str | None
    reward: float | None

    @classmethod
    def from_step(
        cls, state: str, action: str, next_state: str | None, *, stop: StopReason | None, reward: float
    ) -> Edge:
        """Return the edge of a step; `stop` is why its episode ended there, None if it went on."""
        if stop is None:
            return cls(state, action, next_state, None)
        is_end_known = reward > 0 or stop in (StopReason.SUCCESS, StopReason.FAILURE, StopReason.DISASTER)
        return cls(state, action, None, reward if is_end_known else None)


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
        Edge.from_step(
            states[index],
            step.action,
            None if index + 1 == len(steps) else states[index + 1],
            stop=trajectory.stop if index + 1 == len(steps) else None,
            reward=reward,
        )
        for index, step in enumerate(steps)
    ]


class KeyAgreement(NamedTuple):
    """A test of how well keys tell states apart. `pairs` counts the edges between two states whose
    state and action an earlier edge had; `conflicts` counts those of them that led to another state
    than the first such edge.
    """

    pairs: int
    conflicts: int

    def plus(self, other: KeyAgreement) -> KeyAgreement:
        """Return the sums of two."""
        return KeyAgreement(self.pairs + other.pairs, self.conflicts + other.conflicts)

    @classmethod
    def from_edges(cls, edges: Iterable[Edge]) -> KeyAgreement:
        """Return the agreement among the edges of an instance."""
        first_next_states: dict[tuple[str, str], str] = {}
        pairs = conflicts = 0
        for state, action, next_state, _ in edges:
            if next_state is None:
                continue
            if (state, action) in first_next_states:
                pairs += 1
                conflicts += first_next_states[state, action] != next_state
            else:
                first_next_states[state, action] = next_state
        return cls(pairs, conflicts)


@dataclass(frozen=True, slots=True)
class StateGraph:
    """The value of the states of one instance.

    The value of a state is the largest, over all ends that can be reached from it, of the reward
    there times `discount` to the power of the least number of steps to that end. The value of an
    edge is `discount` times the value of what it leads to; the value of an end is its reward. A
    state from which no reward can be reached counts as one step further away than the worst state
    from which one can.
    """

    values_by_state: Mapping[str, float]
    """Value by state; only states from which a reward can be reached."""
    first_edges: Mapping[tuple[str, str], Edge]
    """The first edge with a known target, by state and action."""
    unreachable_value: float
    """The value of a state from which no reward can be reached."""
    discount: float

    @classmethod
    def from_edges(cls, edges: Sequence[Edge], *, discount: float) -> StateGraph:
        """Return the graph of the edges of an instance; `discount` is in (0, 1)."""
        previous_states_by_state: defaultdict[str, list[str]] = defaultdict(list)
        first_edges: dict[tuple[str, str], Edge] = {}
        # States by value, the largest first.
        queue: list[tuple[float, str]] = []
        for edge in edges:
            if edge.next_state is not None:
                previous_states_by_state[edge.next_state].append(edge.state)
            elif edge.reward is not None and edge.reward > 0:
                queue.append((-discount * edge.reward, edge.state))
            if edge.next_state is not None or edge.reward is not None:
                first_edges.setdefault((edge.state, edge.action), edge)
        heapq.heapify(queue)
        values_by_state: dict[str, float] = {}
        while queue:
            negative_value, state = heapq.heappop(queue)
            if state in values_by_state:
                continue
            values_by_state[state] = -negative_value
            for previous_state in previous_states_by_state[state]:
                if previous_state not in values_by_state:
                    heapq.heappush(queue, (discount * negative_value, previous_state))
        return cls(values_by_state, first_edges, discount * min(values_by_state.values(), default=0.0), discount)

    def edge_value(self, edge: Edge) -> float | None:
        """Return the value of an edge, in [0, 1] for rewards up to 1. For an edge with an unknown
        target, it is that of the first edge with the same state and action; None if there is none.
        """
        if edge.next_state is None and edge.reward is None:
            known_edge = self.first_edges.get((edge.state, edge.action))
            return None if known_edge is None else self.edge_value(known_edge)
        if edge.reward is not None and edge.reward > 0:
            return self.discount * edge.reward
        next_value = None if edge.next_state is None else self.values_by_state.get(edge.next_state)
        return self.discount * (self.unreachable_value if next_value is None else next_value)

    def begins_best_path(self, edge: Edge) -> bool | None:
        """Return whether an edge begins a best path from its state to a reward; None if its target
        is unknown, or no reward can be reached from its state.
        """
        value = self.edge_value(edge)
        if value is None or edge.state not in self.values_by_state:
            return None
        return value >= self.values_by_state[edge.state]
