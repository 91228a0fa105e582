"""The advantages of episodes, or of their steps, relative to the others of their group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev

from agentr_core.recipes.grpo import ScaleRewards, StatesConfig
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
        compared = [worth for episode, step in steps if (worth := worths[episode][step]) is not None]
        for (episode, step), advantage in zip(steps, advantages(compared, scale=scale), strict=True):
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
