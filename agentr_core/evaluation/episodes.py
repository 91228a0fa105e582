"""Play the episodes of an evaluation: many at once, each one kept as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentr_core import answers
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.rollout import Ask, EpisodeTimer, Reply, episode
from agentr_core.episodes.shared import SharedEnvironments
from agentr_core.episodes.units import UnitError, run_all
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes import ErrorsConfig
from agentr_core.types import Instance, Sampling, Step, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode to play: number `number` of an instance, from `prefix` on, greedily if it is a
    `greedy` one.
    """

    instance: Instance
    seed: int
    number: int = 0
    prefix: tuple[Step, ...] = ()
    greedy: bool = False

    @property
    def key(self) -> str:
        """`instance#number`, with `@steps` of the prefix where there is one; unique in an
        evaluation.
        """
        return f"{self.instance.key}#{self.number}" + (f"@{len(self.prefix)}" if self.prefix else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """A finished episode. Its replies and counts leave the prefix out; its trajectory does not.

    `invalid_actions` is None where the environment does not tell which actions were valid.
    """

    plan: EpisodePlan
    trajectory: Trajectory
    replies: tuple[Reply, ...]
    depth: int | None
    invalid_actions: int | None
    environment_seconds: float
    sampling_seconds: float


def episode_plans(instances: Sequence[Instance], *, episodes: int, seed: int) -> tuple[EpisodePlan, ...]:
    """Return `episodes` plans for each instance; the seed of each depends on `seed`, instance and
    number alone.
    """
    return tuple(
        EpisodePlan(instance=instance, number=number, seed=derive_seed(seed, "episode", instance.key, number))
        for instance in instances
        for number in range(episodes)
    )


async def evaluate(
    plans: Sequence[EpisodePlan],
    environments: SharedEnvironments,
    sample: Ask,
    *,
    max_steps: int,
    repeats: int = 0,
    sampling: Sampling,
    errors: ErrorsConfig,
    concurrency: int,
    fits: Fits | None = None,
    on_error: Callable[[UnitError], None],
    on_result: Callable[[EpisodeResult], None] | None = None,
    done: Mapping[str, EpisodeResult] | None = None,
    total: int | None = None,
) -> dict[str, EpisodeResult]:
    """Return the results of all plans by key, in their order; those that failed for good are
    missing.

    Args:
        max_steps: the most replies of the model in an episode, the prefix not counted.
        repeats: how often one reply may be given in one state, as in `rollout.episode`.
        fits: where it is given, a conversation that does not fit is read through a window.
        on_error: is called for each failed try of an episode.
        on_result: is called for each newly finished episode.
        done: results of an earlier run, which are not played again.
        total: the number of episodes of the whole evaluation, where `plans` is only what is left of
            it.

    Raises:
        ErrorBudgetSpent: more episodes failed for good than `errors.budget` of the whole
            evaluation.
        UserError: at once, as it is.
    """
    done = done or {}

    async def play(plan: EpisodePlan) -> EpisodeResult:
        async with environments.lend() as env:
            replies: list[Reply] = []
            timer = EpisodeTimer()
            trajectory = await episode(
                plan.instance,
                env,
                sample,
                max_steps=max_steps,
                repeats=repeats,
                sampling=replace(sampling, temperature=0.0) if plan.greedy else sampling,
                seed=plan.seed,
                prefix=plan.prefix,
                fits=fits,
                on_reply=replies.append,
                timer=timer,
            )
            return EpisodeResult(
                plan=plan,
                trajectory=trajectory,
                replies=tuple(replies),
                depth=answers.depth(env, plan.instance),
                invalid_actions=_count_invalid(replies),
                environment_seconds=timer.environment_seconds,
                sampling_seconds=timer.sampling_seconds,
            )

    fresh = await run_all(
        [plan for plan in plans if plan.key not in done],
        play,
        key=lambda plan: plan.key,
        errors=errors,
        on_error=on_error,
        concurrency=concurrency,
        on_result=None if on_result is None else lambda _, result: on_result(result),
        total=len(plans) if total is None else total,
    )
    results = {**done, **fresh}
    return {plan.key: results[plan.key] for plan in plans if plan.key in results}


def _count_invalid(replies: Sequence[Reply]) -> int | None:
    """Count the refused actions; None from an environment that does not tell."""
    flags = [reply.outcome.step.valid for reply in replies]
    return None if None in flags else flags.count(False)
