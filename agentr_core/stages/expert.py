"""Behaviour cloning: the expert's episodes on the training instances of an iteration as samples."""

from __future__ import annotations

import asyncio
from typing import Any

from agentr_core.conversation import opening, turns
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.fingerprint import fingerprint
from agentr_core.protocols import Environment
from agentr_core.rollout import play
from agentr_core.samples import sample_id
from agentr_core.stages.instances import training_instances
from agentr_core.stages.place import Workplace
from agentr_core.store.codec import rejection_rows, sample_rows, trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Instance, Message, Provenance, Rejection, Sample, SampleKind, StopReason, Trajectory

STAGE = "expert"


async def expert_samples(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the expert on the training instances of an iteration and keep each success as a sample.

    Raises:
        ConfigError: the environment has no expert.
        EnvironmentFault: the expert does not solve an instance it claims to solve.
    """
    units, rejections = await asyncio.to_thread(_make, place, iteration)
    iteration_id = place.iteration_id(iteration)
    place.store.write(merge([*units, rejection_rows(rejections, iteration_id=iteration_id)]))
    return {"expert": len(units), "rejected": len(rejections)}


def _make(place: Workplace, iteration: int) -> tuple[list[Rows], list[Rejection]]:
    env = place.make_environment()
    units: list[Rows] = []
    rejections: list[Rejection] = []
    try:
        instances = training_instances(place.recipe, env, iteration)
        for done, instance in enumerate(instances, start=1):
            place.progress(done, len(instances), "expert episodes")
            trajectory = expert_trajectory(env, instance)
            if trajectory is None:
                rejections.append(Rejection(stage=STAGE, subject=instance.key, reason="no-expert-solution"))
                continue
            messages = opening(env, trajectory.first_observation) + turns(trajectory.steps, train=True)[:-1]
            units.append(_rows(place.iteration_id(iteration), trajectory, messages))
    finally:
        env.close()
    if not units:
        raise ConfigError(
            f"environment {place.recipe.environment.name} has no expert; data.use must be revision, good or both"
        )
    return units, rejections


def expert_trajectory(env: Environment, instance: Instance) -> Trajectory | None:
    """Return the expert's episode, played live, or None where it knows no solution.

    Raises `EnvironmentFault` when the expert fails its own replay.
    """
    replies = env.expert(instance)
    if replies is None:
        return None
    first_observation, outcomes = play(env, instance, replies)
    last = outcomes[-1]
    if last.stop is not StopReason.SUCCESS:
        raise EnvironmentFault(
            f"the expert of {env.name} does not solve {instance.key}: after {len(outcomes)} steps the environment "
            f"says {last.step.observation!r}"
        )
    return Trajectory(
        instance=instance,
        first_observation=first_observation,
        steps=tuple(outcome.step for outcome in outcomes),
        reward=last.step.reward,
        success=True,
        stop=last.stop,
    )


def _rows(iteration_id: str, trajectory: Trajectory, messages: tuple[Message, ...]) -> Rows:
    trajectory_id = fingerprint("expert", iteration_id, trajectory.instance.key)
    # The expert says the same in every iteration and run; the trajectory's id keeps their samples apart.
    sample = Sample(
        kind=SampleKind.EXPERT,
        messages=messages,
        instance=trajectory.instance,
        provenance=Provenance(extra={"trajectory": trajectory_id}),
    )
    return merge(
        [
            trajectory_rows(trajectory_id, trajectory, source="expert", iteration_id=iteration_id),
            sample_rows(sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=trajectory_id),
        ]
    )
