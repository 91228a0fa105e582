"""Find the steps of a good path that its reward depends on, by replaying it without the others."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import play_replies
from agentr_core.types import Instance, Step

# A path that ends well need not be a good example: a sampled one contains refused actions, repeated
# looks at the inventory and detours, and training on it teaches them too. As in verified splicing,
# only the environment decides.


def needed_positions(
    env: Environment, instance: Instance, replies: Sequence[str | Step], *, start: int = 0
) -> tuple[int, ...]:
    """Return the positions of the replies to keep, in order: those before `start`, and later ones
    of which none can be left out without lowering the final reward.

    Each reply from `start` on, the last first, is left out for good if the episode, played without
    it, still ends with at least the full reward. So are replies after the end of the episode. That
    may make other replies superfluous, so passes are repeated until one removes nothing; each pass
    plays one episode per remaining reply. The environment must be deterministic. If the replies end
    in a disaster, or there are none, all positions are returned.

    A step that only gathers information changes no reward and is left out. That suits environments
    whose first observation tells everything, but not those in which an agent must search.

    Args:
        start: replies before this position are always kept.
    """
    positions = tuple(range(len(replies)))
    reward, num_played = _final_reward(env, instance, replies, positions)
    if reward is None:
        return positions
    positions = positions[:num_played]
    previous_positions: tuple[int, ...] = ()
    while positions != previous_positions:
        previous_positions = positions
        for position in reversed(positions[start:]):
            candidate_positions = tuple(index for index in positions if index != position)
            final_reward, num_played = _final_reward(env, instance, replies, candidate_positions)
            if final_reward is not None and final_reward >= reward and num_played > start:
                positions = candidate_positions[:num_played]
    return positions


def _final_reward(
    env: Environment, instance: Instance, replies: Sequence[str | Step], positions: Sequence[int]
) -> tuple[float | None, int]:
    """Play the replies at `positions`; return the final reward (None after a disaster or without
    replies), and how many of them were played before the episode ended.
    """
    _, outcomes = play_replies(env, instance, [replies[position] for position in positions])
    if not outcomes or outcomes[-1].step.disaster:
        return None, len(outcomes)
    return outcomes[-1].step.reward, len(outcomes)
