"""Rollouts on training instances: those of an iteration that are not stored yet are played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.runtime.episode_shard import EpisodeShard, rollout_id, with_ungraded
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.choices import PlannedRollout, planned_rows
from agentr_core.store.codec.copies import copy_rollouts, runs_alike
from agentr_core.types import NO_LIMITS, EpisodeLimits, Sampling


def plan_rollouts(place: Workplace, iteration: int, wanted: Mapping[str, EpisodePlan], *, stage: str) -> None:
    """Store which rollouts an iteration plans to play, by trajectory id; those that runs with the
    same inputs of a stage have played are copied.
    """
    iteration_id, collector = place.iteration_id(iteration), place.collector(iteration)
    planned = [
        PlannedRollout(trajectory_id=key, instance=plan.instance, number=plan.number, forced=len(plan.prefix))
        for key, plan in wanted.items()
    ]
    place.store.write(planned_rows(iteration_id, planned))
    for run in runs_alike(place.store, place.run_id, stage):
        missing = place.store.missing("trajectory", list(wanted))
        if not missing:
            break
        theirs = replace(place, run_id=run).iteration_id(iteration)
        originals = {key: rollout_id(theirs, collector.id, wanted[key]) for key in missing}
        copy_rollouts(place.store, originals, iteration_id=iteration_id)


async def play_rollouts(
    place: Workplace,
    iteration: int,
    wanted: Mapping[str, EpisodePlan],
    *,
    stage: str,
    name: str,
    sampling: Sampling,
    max_steps: int,
    limits: EpisodeLimits = NO_LIMITS,
) -> int:
    """Play and store the rollouts of an iteration that are not stored yet; return their number.

    Rollouts that were played and wait for their grade are only graded.

    Args:
        wanted: by trajectory id (`episode_shard.rollout_id`).
        name: what the episodes are for, as a word for progress lines.
        max_steps: the most replies of the policy in an episode.
        limits: the most tokens and seconds of an episode.

    Raises as `shards.carry_out`.
    """
    unplayed = place.store.missing("trajectory", list(wanted))
    missing, left = unplayed[: place.limit], len(unplayed)
    if missing:
        shard = EpisodeShard(
            stage=stage,
            evaluation_id="",
            name=name,
            iteration=iteration,
            checkpoint=place.collector(iteration),
            plans=tuple(wanted[key] for key in missing),
            sampling=sampling,
            max_steps=max_steps,
            limits=limits,
            done=len(wanted) - left,
            total=len(wanted) - left + len(missing),
        )
        shard = with_ungraded(place.store, shard, place.iteration_id(iteration))
        await place.work_through(shard, stage, iteration, f"episodes of {name}")
    return len(missing)
