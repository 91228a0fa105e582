"""The steps of a good path that its outcome needs, found by playing it without the others."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import play
from agentr_core.types import Instance

# A path that ends well need not be a good example: a sampled one contains refused actions, repeated
# looks at the inventory and detours, and training on it teaches them too. As in verified splicing,
# only the environment decides.


def needed(env: Environment, instance: Instance, replies: Sequence[str], *, start: int = 0) -> tuple[int, ...]:
    """Return the positions of the replies to keep: from `start` on, leaving out any one of them
    would lower the final reward.

    Replies are tried one by one, the last first, each time by playing the whole episode without
    them: a reply stays out if the episode still ends with the full reward. Replies after the end of
    the episode are left out too. What served only a reply that was left out may be free to go then,
    so this is repeated until all stay: each time costs an episode for each reply that is left. The
    environment must be deterministic.

    A step that only gathers information changes no reward and is left out. This suits worlds whose
    first observation tells everything, but not those in which an agent has to look for things.

    Args:
        start: replies before this one always stay.
    """
    positions = tuple(range(len(replies)))
    reward, length = _final(env, instance, replies, positions)
    if reward is None:
        return positions
    positions = positions[:length]
    before: tuple[int, ...] = ()
    while positions != before:
        before = positions
        for position in reversed(positions[start:]):
            candidate = tuple(index for index in positions if index != position)
            final_reward, length = _final(env, instance, replies, candidate)
            if final_reward is not None and final_reward >= reward and length > start:
                positions = candidate[:length]
    return positions


def _final(
    env: Environment, instance: Instance, replies: Sequence[str], positions: Sequence[int]
) -> tuple[float | None, int]:
    """Return the final reward of the chosen replies, None for a disaster, and how many of them were
    played.
    """
    _, outcomes = play(env, instance, [replies[position] for position in positions])
    if not outcomes or outcomes[-1].step.disaster:
        return None, len(outcomes)
    return outcomes[-1].step.reward, len(outcomes)
