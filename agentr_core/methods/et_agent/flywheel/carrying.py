"""Carries out a draft: the world gets the written reply, then the policy goes on to the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentr_core.episodes.asking import Helper
from agentr_core.episodes.conversation import Fits, TokensOf
from agentr_core.episodes.drawing import Ask
from agentr_core.episodes.replay import restore
from agentr_core.episodes.rollout import episode
from agentr_core.episodes.steps import EpisodeTimer, Reply, call, step_with
from agentr_core.episodes.units import phase
from agentr_core.methods.et_agent.flywheel.drafts import Draft
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.et_agent import FlywheelConfig
from agentr_core.recipes.sampling import sampling_of
from agentr_core.store.codec.generations import Draw
from agentr_core.types import Instance, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTrajectory:
    """A trajectory, and the draws of the replies that were drawn for it, by position."""

    trajectory: Trajectory
    draws: dict[int, Draw] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens that were drawn for the trajectory."""
        return sum(draw.generation.completion_tokens for draw in self.draws.values())


async def carry_out(
    draft: Draft,
    instance: Instance,
    env: Environment,
    sample: Ask,
    config: FlywheelConfig,
    *,
    seed: int,
    fits: Fits | None,
    timer: EpisodeTimer,
    helper: Helper,
    tokens_of: TokensOf,
) -> DrawnTrajectory:
    """Return the trajectory that a draft becomes, not graded yet. Raises as `rollout.episode`."""
    prefix = draft.prefix
    if draft.reply:
        with phase("restore"):
            first = await call(env, timer, lambda: restore(env, instance, prefix))
        led_to = await step_with(env, timer, draft.reply, helper, seed=seed, session=f"{instance.key}#{seed}")
        prefix = (*prefix, led_to.step)
        if led_to.stop is not None:
            return DrawnTrajectory(trajectory=Trajectory.ended(instance, first, prefix, led_to.stop))
    replies: list[Reply] = []
    trajectory = await episode(
        instance,
        env,
        sample,
        max_steps=config.max_steps,
        sampling=sampling_of(config),
        seed=seed,
        prefix=prefix,
        fits=fits,
        on_reply=replies.append,
        timer=timer,
        helper=helper,
        limits=config.limits,
        tokens_of=tokens_of,
    )
    return DrawnTrajectory(trajectory=trajectory, draws=_draws(replies, len(prefix)))


def _draws(replies: Sequence[Reply], first: int) -> dict[int, Draw]:
    return {
        position: Draw(seed=reply.seed, number=0, generation=reply.generation)
        for position, reply in enumerate(replies, start=first)
    }
