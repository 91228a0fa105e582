"""Episodes to play as a shard: of an evaluation, or rollouts on training instances."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from agentr_core.episodes.rollout import EnvironmentPool, Helper, Outcome, Reply
from agentr_core.evaluation.episodes import EpisodePlan, EpisodeResult, Player, count_invalid, play_all
from agentr_core.fingerprint import fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.runtime.context import RunContext, helpers
from agentr_core.runtime.equipment import (
    Checkpoint,
    Effort,
    Equipment,
    Progress,
    Sink,
    concurrency_for,
    count_units,
    effort_of,
    sampler_progress,
    summary_tests,
    token_counter,
    window_test,
    with_backpressure,
)
from agentr_core.store.codec.samples import PlannedRollout, planned_rollout_rows
from agentr_core.store.codec.trajectories import (
    copy_trajectories,
    episode_rows,
    load_draws,
    load_trajectories,
    runs_with_same_input,
    trajectory_rows,
)
from agentr_core.store.database import Store
from agentr_core.store.tables import Draw, Rows
from agentr_core.types import NO_LIMITS, EpisodeLimits, Sampling

# Episodes that were played and could not be graded: stored apart, until a rerun has them graded.
#
# They are trajectories of their own, with the rewards that they had without a grade, so that no
# count of episodes includes them.

UNGRADED = "ungraded"


def ungraded_id(trajectory_id: str) -> str:
    """Return the id under which an episode is stored until it is graded, given its final id."""
    return fingerprint(UNGRADED, trajectory_id)


def draws_of(result: EpisodeResult) -> dict[int, Draw]:
    """Return the draw behind each sampled reply of an episode, by the position of its step."""
    start = len(result.plan.prefix)
    return {
        position: Draw(seed=reply.seed, number=0, generation=reply.generation)
        for position, reply in enumerate(result.replies, start)
    }


def load_ungraded(store: Store, plans: Mapping[str, EpisodePlan]) -> dict[str, EpisodeResult]:
    """Return those of the planned episodes that are stored and wait for their grade, by the key of
    their plan.

    Args:
        plans: the plans by `ungraded_id` of their episodes.

    Raises as `Store.reading`.
    """
    trajectories = load_trajectories(store, list(plans))
    draws = load_draws(store, "step", list(trajectories))
    results = {}
    for key, trajectory in trajectories.items():
        plan = plans[key]
        replies = tuple(
            Reply(
                seed=draw.seed,
                generation=draw.generation,
                outcome=Outcome(
                    step=trajectory.steps[position],
                    stop=trajectory.stop if position + 1 == len(trajectory.steps) else None,
                ),
            )
            for position, (draw,) in sorted(draws.get(key, {}).items())
        )
        results[plan.key] = EpisodeResult(
            plan=plan,
            trajectory=trajectory,
            replies=replies,
            depth=None,
            invalid_actions=count_invalid(replies),
            environment_seconds=None,
            sampling_seconds=None,
        )
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShard:
    """Episodes of one stage that are not played yet, sampled as its recipe says. See
    `equipment.Shard`.

    Those that belong to no evaluation (`evaluation_id` is empty) are stored as rollouts, or as
    trajectories of another `source`.
    """

    stage: str
    evaluation_id: str
    name: str
    iteration: int
    checkpoint: Checkpoint
    plans: tuple[EpisodePlan, ...]
    sampling: Sampling
    max_steps: int
    repeats: int = 0
    limits: EpisodeLimits = NO_LIMITS
    source: str = "rollout"
    done: int
    total: int
    ungraded: Mapping[str, EpisodeResult] = field(default_factory=dict)
    """Episodes that were played earlier and wait for their grade, by the key of their plan."""

    def __len__(self) -> int:
        return len(self.plans)

    def trajectory_id(self, iteration_id: str, plan: EpisodePlan) -> str:
        """Return the trajectory id of an episode."""
        if self.evaluation_id:
            return episode_id(self.evaluation_id, plan.key)
        return rollout_id(iteration_id, self.checkpoint.id, plan)

    def split(self, size: int) -> tuple[EpisodeShard, ...]:
        """Return the same episodes as shards of at most `size`, with an absolute path to the
        checkpoint.
        """
        anywhere = replace(self, checkpoint=self.checkpoint.absolute())
        return tuple(
            replace(anywhere, plans=self.plans[start : start + size]) for start in range(0, len(self.plans), size)
        )

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Play the episodes; `sink` is given the rows of each. Raises as `equipment.Shard.work`."""
        path = self.checkpoint.path
        async with (
            equipment.sampling(path, self.checkpoint.role) as sampler,
            helpers(equipment, path, sampler, sink) as helper_models,
        ):
            effort = await self.play(equipment, sink, sampler, helper_models.ask)
            return effort + effort_of(sampler) + helper_models.effort()

    async def play(self, equipment: Equipment, sink: Sink, sampler: Sampler, helper: Helper) -> Effort:
        """Play the episodes with a sampler and a helper that other shards may share; what these two
        spend is not part of the returned effort.
        """
        recipe = equipment.recipe
        iteration_id = equipment.iteration_id(self.iteration)
        units = f"episodes of {self.name}"
        with closing(EnvironmentPool(equipment.make_environment)) as environments:
            player = Player(
                environments=environments,
                sample=with_backpressure(sampler, sink),
                sampling=self.sampling,
                max_steps=self.max_steps,
                repeats=self.repeats,
                fits=window_test(recipe, sampler, self.sampling),
                summaries=summary_tests(recipe, sampler, self.sampling),
                helper=helper,
                limits=self.limits,
                count_tokens=token_counter(sampler),
                ungraded={plan.key: self.ungraded[plan.key] for plan in self.plans if plan.key in self.ungraded},
            )
            async with count_units(
                equipment.progress, sampler, units, total=self.total, done=self.done
            ) as count_episode:

                def store_result(result: EpisodeResult) -> None:
                    sink.add(self._rows(result, iteration_id))
                    count_episode()

                results = await play_all(
                    self.plans,
                    player,
                    errors=recipe.errors,
                    concurrency=concurrency_for(sampler, 1, configured=recipe.scale.concurrency),
                    on_error=equipment.on_error(sink, self.stage, self.iteration),
                    on_result=store_result,
                    total=self.total,
                    on_ungraded=lambda result: sink.add(self._ungraded_rows(result, iteration_id)),
                )
        return Effort(
            environment_seconds=sum(result.environment_seconds or 0.0 for result in results.values()),
            num_lost=len(self.plans) - len(results),
        )

    def _ungraded_rows(self, result: EpisodeResult, iteration_id: str) -> Rows:
        return trajectory_rows(
            ungraded_id(self.trajectory_id(iteration_id, result.plan)),
            result.trajectory,
            source=UNGRADED,
            iteration_id=iteration_id,
            draws=draws_of(result),
            num_given_steps=len(result.plan.prefix),
        )

    def _rows(self, result: EpisodeResult, iteration_id: str) -> Rows:
        plan = result.plan
        trajectory_id = self.trajectory_id(iteration_id, plan)
        if not self.evaluation_id:
            return trajectory_rows(
                trajectory_id,
                result.trajectory,
                source=self.source,
                iteration_id=iteration_id,
                draws=draws_of(result),
                grading=result.grading,
                num_given_steps=len(plan.prefix),
            )
        return episode_rows(
            trajectory_id,
            result.trajectory,
            evaluation_id=self.evaluation_id,
            iteration_id=iteration_id,
            repeat=plan.number,
            cut=len(plan.prefix),
            invalid_actions=result.invalid_actions,
            environment_seconds=result.environment_seconds,
            sampling_seconds=result.sampling_seconds,
            draws=draws_of(result),
            grading=result.grading,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShards:
    """Episodes of several evaluations of one checkpoint, played at the same time so that batches
    stay full.
    """

    shards: tuple[EpisodeShard, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that plays."""
        return self.shards[0].checkpoint

    @property
    def done(self) -> int:
        """Episodes that were played before."""
        return sum(shard.done for shard in self.shards)

    @property
    def total(self) -> int:
        """Episodes of all evaluations."""
        return sum(shard.total for shard in self.shards)

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def split(self, size: int) -> tuple[EpisodeShards, ...]:
        """Return the same episodes as shards of at most `size`, each of one evaluation."""
        return tuple(EpisodeShards(shards=(part,)) for shard in self.shards for part in shard.split(size))

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Play the episodes; `sink` is given the rows of each. Raises as `equipment.Shard.work`."""
        path = self.checkpoint.path
        async with equipment.sampling(path) as sampler, helpers(equipment, path, sampler, sink) as helper_models:
            done_counts = {shard.name: shard.done for shard in self.shards}

            def progress_of(name: str) -> Progress:
                def progress(number: int, total: int, note: str) -> None:
                    done_counts[name] = number
                    units = f"held-out episodes, {sampler_progress(sampler, resumed=self.done > 0)}"
                    equipment.progress(sum(done_counts.values()), self.total, units)

                return progress

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(
                            shard.play(
                                replace(equipment, progress=progress_of(shard.name)), sink, sampler, helper_models.ask
                            )
                        )
                        for shard in self.shards
                    ]
            except ExceptionGroup as faults:
                # The first fault ended the other tasks.
                raise faults.exceptions[0] from None
            return sum((task.result() for task in tasks), effort_of(sampler) + helper_models.effort())


def episode_id(evaluation_id: str, key: str) -> str:
    """Return the trajectory id of an episode of an evaluation; `key` is that of its plan."""
    return fingerprint("episode", evaluation_id, key)


def rollout_id(iteration_id: str, checkpoint_id: str, plan: EpisodePlan) -> str:
    """Return the trajectory id of a rollout: a hash of its iteration, its checkpoint, the key of
    its plan, the steps that it continues, and the diagnosis that the model reads with them, if any.
    """
    prefix = [(step.reply, step.observation) for step in plan.prefix]
    extra = [value for value in (prefix, plan.diagnosis) if value]
    return fingerprint("rollout", iteration_id, checkpoint_id, plan.key, *extra)


def with_ungraded(store: Store, shard: EpisodeShard, iteration_id: str) -> EpisodeShard:
    """Return a shard with its stored episodes that were played and wait for a grade.

    Raises as `Store.reading`.
    """
    plans_by_id = {ungraded_id(shard.trajectory_id(iteration_id, plan)): plan for plan in shard.plans}
    return replace(shard, ungraded=load_ungraded(store, plans_by_id))


# Rollouts on training instances: those of an iteration that are not stored yet are played.


def plan_rollouts(ctx: RunContext, iteration: int, plans: Mapping[str, EpisodePlan], *, stage: str) -> None:
    """Store which rollouts an iteration plans to play, given by trajectory id, and copy those that
    other runs with the same inputs of the stage have already played.
    """
    iteration_id, collector = ctx.iteration_id(iteration), ctx.collector(iteration)
    rollouts = [
        PlannedRollout(trajectory_id=key, instance=plan.instance, number=plan.number, num_forced_steps=len(plan.prefix))
        for key, plan in plans.items()
    ]
    ctx.store.write(planned_rollout_rows(iteration_id, rollouts))
    for other_run_id in runs_with_same_input(ctx.store, ctx.run_id, stage):
        missing = ctx.store.missing("trajectory", list(plans))
        if not missing:
            break
        other_iteration_id = replace(ctx, run_id=other_run_id).iteration_id(iteration)
        originals = {key: rollout_id(other_iteration_id, collector.id, plans[key]) for key in missing}
        copy_trajectories(ctx.store, originals, iteration_id=iteration_id)


async def play_rollouts(
    ctx: RunContext,
    iteration: int,
    plans: Mapping[str, EpisodePlan],
    *,
    stage: str,
    name: str,
    sampling: Sampling,
    max_steps: int,
    limits: EpisodeLimits = NO_LIMITS,
    checkpoint: Checkpoint | None = None,
) -> int:
    """Play and store the rollouts of an iteration that are not stored yet, at most `ctx.limit`;
    return how many were attempted.

    Rollouts that were played and wait for their grade are only graded.

    Args:
        plans: by trajectory id (`episode_shard.rollout_id`).
        name: what the episodes are for, as a word for progress lines.
        max_steps: the most replies of the policy in an episode.
        limits: the most tokens and seconds of an episode.
        checkpoint: who plays; None: the collector of the iteration.

    Raises as `equipment.run_shard`.
    """
    unplayed_ids = ctx.store.missing("trajectory", list(plans))
    missing, num_unplayed = unplayed_ids[: ctx.limit], len(unplayed_ids)
    if missing:
        shard = EpisodeShard(
            stage=stage,
            evaluation_id="",
            name=name,
            iteration=iteration,
            checkpoint=checkpoint or ctx.collector(iteration),
            plans=tuple(plans[key] for key in missing),
            sampling=sampling,
            max_steps=max_steps,
            limits=limits,
            done=len(plans) - num_unplayed,
            total=len(plans) - num_unplayed + len(missing),
        )
        shard = with_ungraded(ctx.store, shard, ctx.iteration_id(iteration))
        await ctx.work_through(shard, stage, iteration, f"episodes of {name}")
    return len(missing)
