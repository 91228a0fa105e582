"""The flywheel of an iteration: the policy answers the training questions, and what it wrote is
varied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.et_agent.flywheel.carrying import DrawnTrajectory
from agentr_core.methods.et_agent.flywheel.family import round_of
from agentr_core.methods.et_agent.flywheel.tagged import Tagged
from agentr_core.methods.et_agent.flywheel.turns import manner_of
from agentr_core.methods.et_agent.stages.family_maker import STAGE, FamilyWork, Kept, Said
from agentr_core.methods.et_agent.stages.family_shard import FamilyShard
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.ungraded import UNGRADED
from agentr_core.store.codec.families import load_edits, load_members, tokens_written
from agentr_core.store.codec.generations import load_draws
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.types import Instance, Trajectory

VERSION = 1
"""Increase it when the same configuration would make different families."""


def family_ids(place: Workplace, iteration: int, instances: Sequence[Instance]) -> dict[str, Instance]:
    """Return the instance of each family that an iteration wants, by family id. Raises `DataFault`
    without a policy.
    """
    collector, iteration_id = place.collector(iteration), place.iteration_id(iteration)
    return {fingerprint("family", VERSION, iteration_id, collector.id, each.key): each for each in instances}


async def evolve(place: Workplace, iteration: int) -> dict[str, Any]:
    """Grow the unfinished families of an iteration; return how many questions and trajectories
    there are.

    Raises:
        ErrorBudgetSpent: more questions failed than the recipe allows; what was made is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    wanted = family_ids(place, iteration, await separate_instances(place, iteration))
    unfinished = place.store.missing("family", list(wanted))
    missing, left = unfinished[: place.limit], len(unfinished)
    if missing:
        shard = FamilyShard(
            iteration=iteration,
            checkpoint=place.collector(iteration),
            families=_begun(place, iteration, {key: wanted[key] for key in missing}),
            done=len(wanted) - left,
            total=len(wanted) - left + len(missing),
        )
        await place.work_through(shard, STAGE, iteration, "questions")
    members = load_members(place.store, place.iteration_id(iteration))
    right = sum(member.success for member in members.values())
    return {"questions": len(wanted), "new": len(missing), "trajectories": len(members), "right": right}


def check_operators(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` for an operator that the world of the instances has no use for."""
    if not instances or "C2" not in recipe.et_agent.flywheel.correct:
        return
    if not isinstance(manner_of(env, instances[0]), Tagged):
        raise ConfigError(
            f"et_agent.flywheel.correct: C2 rewrites thoughts, but steps of {env.name} have no thought "
            "apart from the action; leave it out"
        )


def _begun(place: Workplace, iteration: int, wanted: Mapping[str, Instance]) -> tuple[FamilyWork, ...]:
    """Return families with the stored part of each."""
    iteration_id = place.iteration_id(iteration)
    members = load_members(place.store, iteration_id)
    tokens = tokens_written(place.store, list(members))
    kept: dict[str, dict[str, Kept]] = {}
    for key, member in members.items():
        kept.setdefault(member.instance.key, {})[key] = Kept(trajectory=member, tokens=tokens.get(key, 0))
    said: dict[str, dict[str, Said]] = {}
    for edit in load_edits(place.store, iteration_id):
        said.setdefault(edit.instance_id, {})[edit.edit_id] = Said(edit.answer, round_of(edit.subject))
    waiting = _ungraded(place, iteration_id)
    return tuple(
        FamilyWork(
            family_id=key,
            instance=instance,
            members=kept.get(instance.key, {}),
            said=said.get(instance.key, {}),
            ungraded=waiting.get(instance.key, {}),
        )
        for key, instance in wanted.items()
    )


def _ungraded(place: Workplace, iteration_id: str) -> dict[str, dict[str, DrawnTrajectory]]:
    """Return the trajectories that wait for their grade, by instance and id."""
    found: Mapping[str, Trajectory] = load_trajectories(place.store, iteration_id=iteration_id, source=UNGRADED)
    draws = load_draws(place.store, "step", list(found))
    waiting: dict[str, dict[str, DrawnTrajectory]] = {}
    for key, trajectory in found.items():
        drawn = {position: draw for position, (draw,) in draws.get(key, {}).items()}
        waiting.setdefault(trajectory.instance.key, {})[key] = DrawnTrajectory(trajectory=trajectory, draws=drawn)
    return waiting
