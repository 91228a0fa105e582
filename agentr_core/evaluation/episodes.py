"""Play the episodes of an evaluation: many at once, each stored as soon as it is finished."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import (
    EnvironmentPool,
    EpisodeTimer,
    Helper,
    Reply,
    SampleReplies,
    no_helper,
    roll_out_episode,
)
from agentr_core.episodes.transcript import CountTokens, FitsContext, SummaryLimits
from agentr_core.episodes.units import UnitError, run_all
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.recipe import ErrorsConfig
from agentr_core.types import NO_LIMITS, EpisodeLimits, Grading, Instance, Rejection, Sampling, Step, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode to play: number `number` of an instance, starting from `prefix`, played greedily
    if `greedy` is set.
    """

    instance: Instance
    seed: int
    number: int = 0
    prefix: tuple[Step, ...] = ()
    greedy: bool = False
    max_steps: int | None = None
    repeats: int | None = None
    """`max_steps` and this are the limits of the episode's own world; None: those of its
    `Player`.
    """
    diagnosis: str = ""
    """A text that the model reads after the prefix, the steps of an earlier try, before it goes on
    from there.
    """

    @property
    def key(self) -> str:
        """The name of the episode, unique in its evaluation; see `Instance.episode`."""
        return self.instance.episode(self.number, len(self.prefix))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """A finished episode. Its replies and counts leave out the prefix; its trajectory does not.

    `invalid_actions` is None if the environment does not say which actions were valid.
    """

    plan: EpisodePlan
    trajectory: Trajectory
    replies: tuple[Reply, ...]
    depth: int | None
    invalid_actions: int | None
    environment_seconds: float | None
    sampling_seconds: float | None
    """This and `environment_seconds` are None for an episode that an earlier process played."""
    grading: Grading | None = None


def episode_plans(instances: Sequence[Instance], *, episodes: int, seed: int) -> tuple[EpisodePlan, ...]:
    """Return `episodes` plans for each instance. The seed of a plan depends only on `seed`, the
    instance and the number of the episode.
    """
    return tuple(
        EpisodePlan(instance=instance, number=number, seed=derive_seed(seed, "episode", instance.key, number))
        for instance in instances
        for number in range(episodes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A player of episodes, which also has them graded.

    `sample` returns replies of the model, sampled as `sampling` says; `helper` answers the
    questions that steps and the environment's grader put to models of other roles.
    """

    environments: EnvironmentPool
    sample: SampleReplies
    sampling: Sampling
    max_steps: int
    """The maximum number of model replies in an episode, not counting the prefix."""
    repeats: int = 0
    """End an episode once the model gives one reply in one state this many times; 0: never."""
    fits: FitsContext | None = None
    """If given, the oldest exchanges of a conversation that does not fit the context are left
    out.
    """
    summaries: SummaryLimits | None = None
    """If given, the model sums up a conversation that does not fit, and goes on from that."""
    helper: Helper = no_helper
    limits: EpisodeLimits = NO_LIMITS
    count_tokens: CountTokens | None = None
    """Counts the tokens of a prompt; see `rollout.roll_out_episode`."""
    ungraded: dict[str, EpisodeResult] = field(default_factory=dict)
    """Episodes that were played and have no grade yet, by `EpisodePlan.key`. They are not played
    again, only graded.
    """

    async def play_and_grade(self, plan: EpisodePlan) -> EpisodeResult:
        """Play the episode of a plan, have it graded, and return the result. If grading fails, the
        played episode stays in `ungraded`, and the next call only grades it.
        """
        async with self.environments.lend(plan.instance) as env:
            result = self.ungraded.get(plan.key)
            if result is None:
                replies: list[Reply] = []
                timer = EpisodeTimer()
                trajectory = await roll_out_episode(
                    plan.instance,
                    env,
                    self.sample,
                    max_steps=self.max_steps if plan.max_steps is None else plan.max_steps,
                    max_repeats=self.repeats if plan.repeats is None else plan.repeats,
                    sampling=replace(self.sampling, temperature=0.0) if plan.greedy else self.sampling,
                    seed=plan.seed,
                    prefix=plan.prefix,
                    diagnosis=plan.diagnosis,
                    fits=self.fits,
                    summaries=self.summaries,
                    on_reply=replies.append,
                    timer=timer,
                    helper=self.helper,
                    limits=self.limits,
                    count_tokens=self.count_tokens,
                )
                result = self.ungraded[plan.key] = EpisodeResult(
                    plan=plan,
                    trajectory=trajectory,
                    replies=tuple(replies),
                    depth=env.depth(plan.instance),
                    invalid_actions=count_invalid(replies),
                    environment_seconds=timer.environment_seconds,
                    sampling_seconds=timer.sampling_seconds,
                )
            trajectory, grading = await grade_episode(env, result.trajectory, self.helper, seed=plan.seed)
        del self.ungraded[plan.key]
        return replace(result, trajectory=trajectory, grading=grading)


async def play_all(
    plans: Sequence[EpisodePlan],
    player: Player,
    *,
    errors: ErrorsConfig,
    concurrency: int,
    on_error: Callable[[UnitError], None],
    on_result: Callable[[EpisodeResult], None] | None = None,
    total: int | None = None,
    on_ungraded: Callable[[EpisodeResult], None] | None = None,
) -> dict[str, EpisodeResult]:
    """Return the results of all plans by key, in their order; those that failed for good are
    missing.

    Args:
        on_error: called for each failed attempt at an episode.
        on_result: called for each finished episode.
        total: the number of episodes of the whole evaluation, if `plans` holds only the remaining
            ones.
        on_ungraded: called at the end for each episode that was played but could not be graded.

    Raises:
        ErrorBudgetSpent: more episodes failed for good than the share `errors.budget` of the whole
            evaluation.
        UserError: raised at once, unchanged.
    """
    try:
        return await run_all(
            plans,
            player.play_and_grade,
            key=lambda plan: plan.key,
            errors=errors,
            on_error=on_error,
            concurrency=concurrency,
            on_result=None if on_result is None else lambda _, result: on_result(result),
            num_units=total,
        )
    finally:
        # Played episodes are kept even if the grader failed for good or the stage was stopped.
        for result in player.ungraded.values():
            if on_ungraded is not None:
                on_ungraded(result)


def count_invalid(replies: Sequence[Reply]) -> int | None:
    """Return the number of actions that the environment refused; None if it does not report
    that.
    """
    flags = [reply.outcome.step.valid for reply in replies if reply.outcome.step.summary_of is None]
    return None if None in flags else flags.count(False)


# The revision test: can a model recover from the beginning of a failed episode of the base model?
#
# Source: Agent-R (arXiv 2501.11425), section 4.3 and table 3. The cuts are drawn once, from the
# base model's episodes, so that every model continues from the same states.


def revision_plans(
    episodes: Sequence[tuple[int, Trajectory]], *, cuts: int, seed: int
) -> tuple[tuple[EpisodePlan, ...], tuple[Rejection, ...]]:
    """Return a plan for an episode from each cut, and a rejection for each failed trajectory that
    cannot be cut, since it has fewer than two steps.

    A trajectory failed if its reward is not above 0. For each, up to `cuts` different lengths of
    the prefix are drawn; at least one step is kept and at least one is cut off, so that no prefix
    ends the episode.

    Args:
        episodes: the base model's, each with its number among those of its instance.
        seed: the cuts of an episode depend only on `seed`, the instance and that number.
    """
    plans: list[EpisodePlan] = []
    rejections: list[Rejection] = []
    for number, trajectory in episodes:
        key = trajectory.instance.key
        if trajectory.reward > 0:
            continue
        possible_cuts = range(1, len(trajectory.steps))
        if not possible_cuts:
            subject, detail = f"{key}#{number}", f"{len(trajectory.steps)} steps"
            rejections.append(Rejection(stage="revision-test", subject=subject, reason="too-short", detail=detail))
            continue
        rng = random.Random(derive_seed(seed, "cut", key, number))
        for cut in sorted(rng.sample(possible_cuts, min(cuts, len(possible_cuts)))):
            plans.append(
                EpisodePlan(
                    instance=trajectory.instance,
                    number=number,
                    seed=revision_seed(seed, trajectory.instance, number, cut),
                    prefix=trajectory.steps[:cut],
                )
            )
    return tuple(plans), tuple(rejections)


def revision_seed(seed: int, instance: Instance, number: int, cut: int) -> int:
    """Return the seed with which a model continues after `cut` steps of episode `number` of an
    instance.
    """
    return derive_seed(seed, "revision", instance.key, number, cut)
