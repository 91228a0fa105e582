"""Exploration: the policy plays the training instances of an iteration, or goes on from the
expert's first steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentr_core.episodes.conversation import opening, turns
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.runtime.episode_shard import EpisodeShard, rollout_id
from agentr_core.runtime.instances import separate_instances, training_instances
from agentr_core.runtime.place import Workplace
from agentr_core.samples.identity import sample_id
from agentr_core.samples.stretches import split
from agentr_core.stages.demonstrate import expert_id
from agentr_core.store.codec import copy_rollouts, load_trajectories, rejection_rows, runs_alike, sample_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Instance, Provenance, Rejection, Sample, SampleKind, Sampling, Trajectory

STAGE = "explore"


def exploration(place: Workplace, iteration: int) -> dict[str, EpisodePlan]:
    """Return the episodes of an iteration's exploration by the id of their trajectory.

    Number 0 of an instance is greedy, the others are drawn. Where replies are compared step by
    step, each episode is played from every fork of the expert's, or from
    `eto.preferences.forced_steps` of them spread evenly.

    Raises `DataFault` without a policy.
    """
    env = place.make_environment()
    try:
        instances = training_instances(place.recipe, env, iteration)
    finally:
        env.close()
    iteration_id = place.iteration_id(iteration)
    policy = place.policy(iteration)
    experts = _experts(place, iteration, instances)
    plans = [plan for instance in instances for plan in _plans(place, iteration, instance, experts.get(instance.key))]
    return {rollout_id(iteration_id, policy.id, plan): plan for plan in plans}


async def explore(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play what is missing of an iteration's exploration; episodes of another run that asked for
    the same are copied.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: training and test instances meet, or the policy is not there.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    return (await _explore(place, iteration))[0]


async def explore_and_keep(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play what is missing of an iteration's exploration, and keep its successes as samples. Raises
    as `explore`.
    """
    told, successes = await _explore(place, iteration)
    _keep(place, iteration, successes)
    return told


async def _explore(place: Workplace, iteration: int) -> tuple[dict[str, Any], dict[str, Trajectory]]:
    """Return what to tell of an exploration, and its successes by id."""
    await separate_instances(place, iteration)
    wanted = exploration(place, iteration)
    _take_over(place, iteration, wanted)
    missing = place.store.missing("trajectory", list(wanted))
    config = place.recipe.eto.explore
    if missing:
        shard = EpisodeShard(
            stage=STAGE,
            evaluation_id="",
            name=STAGE,
            iteration=iteration,
            checkpoint=place.policy(iteration),
            plans=tuple(wanted[key] for key in missing),
            sampling=Sampling(temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens),
            max_steps=config.max_steps,
            done=len(wanted) - len(missing),
            total=len(wanted),
        )
        await place.work_through(shard, STAGE, iteration, "episodes of exploration")
    played = load_trajectories(place.store, list(wanted))
    successes = {key: trajectory for key, trajectory in played.items() if trajectory.success}
    return {"episodes": len(wanted), "new": len(missing), "successes": len(successes)}, successes


def _take_over(place: Workplace, iteration: int, wanted: Mapping[str, EpisodePlan]) -> None:
    """Copy episodes of runs whose exploration asks for the same, where an iteration has none."""
    policy = place.policy(iteration)
    for run in runs_alike(place.store, place.run_id, STAGE):
        theirs = replace(place, run_id=run).iteration_id(iteration)
        missing = place.store.missing("trajectory", list(wanted))
        originals = {key: rollout_id(theirs, policy.id, wanted[key]) for key in missing}
        copy_rollouts(place.store, originals, iteration_id=place.iteration_id(iteration))


def _plans(place: Workplace, iteration: int, instance: Instance, expert: Trajectory | None) -> list[EpisodePlan]:
    recipe = place.recipe
    config = recipe.eto.explore
    numbers = range(0 if config.greedy else 1, config.samples + 1)
    cuts = _spread(len(expert.steps), recipe.eto.preferences.forced_steps) if expert else [0]
    return [
        EpisodePlan(
            instance=instance,
            number=number,
            seed=derive_seed(recipe.seed, STAGE, iteration, instance.key, number),
            prefix=expert.steps[:cut] if expert else (),
            greedy=number == 0,
        )
        for cut in cuts
        for number in numbers
    ]


def _experts(place: Workplace, iteration: int, instances: tuple[Instance, ...]) -> dict[str, Trajectory]:
    """Return the expert's episodes by instance where an iteration compares step by step, else
    none.
    """
    recipe = place.recipe
    if not place.plan(iteration).pairs or recipe.eto.preferences.level == "trajectory":
        return {}
    ids = [expert_id(place.iteration_id(iteration), instance) for instance in instances]
    return {found.instance.key: found for found in load_trajectories(place.store, ids).values()}


def _spread(length: int, limit: int) -> list[int]:
    if not limit or limit >= length:
        return list(range(length))
    return [position * length // limit for position in range(limit)]


def _keep(place: Workplace, iteration: int, successes: dict[str, Trajectory]) -> None:
    iteration_id = place.iteration_id(iteration)
    units: list[Rows] = []
    env = place.make_environment()
    try:
        for key, trajectory in successes.items():
            whole = Sample(
                kind=SampleKind.GOOD,
                messages=opening(env, trajectory.first_observation) + turns(trajectory.steps, train=True)[:-1],
                instance=trajectory.instance,
                provenance=Provenance(good_reward=trajectory.reward, extra={"trajectory": key}),
            )
            dropped = [step.dropped for step in trajectory.steps]
            read = split(whole, dropped, place.recipe.data.windowed, stage=STAGE, subject=key)
            if isinstance(read, Rejection):
                units.append(rejection_rows([read], iteration_id=iteration_id))
                continue
            units += [sample_rows(sample_id(s), s, iteration_id=iteration_id, trajectory_id=key) for s in read]
    finally:
        env.close()
    place.store.write(merge(units))
