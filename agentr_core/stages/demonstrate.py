"""The expert's episodes on the training instances of an iteration: played live, and kept as samples
if they are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from agentr_core import answers
from agentr_core.episodes.replay import play
from agentr_core.episodes.steps import EpisodeTimer
from agentr_core.episodes.transcript import whole_episode
from agentr_core.episodes.units import allowed_losses
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault, IllTypedAnswer, Transient
from agentr_core.fingerprint import fingerprint
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Method, Workplace
from agentr_core.samples.expert_file import Demonstration, read_demonstrations
from agentr_core.samples.identity import sample_id
from agentr_core.samples.json_lines import World
from agentr_core.stages.thoughts import check_thoughts, labelled
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.codec.trajectories import load_trajectories, trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.threads import check_wanted, in_thread
from agentr_core.types import Instance, Provenance, Rejection, Sample, SampleKind, StopReason, Trajectory

STAGE = "expert"
BARE = "bare"
"""The source of the expert's episodes as they were played, where thoughts are written for them."""
LOOKED_AT = 20
"""How many training instances are asked for an expert before anything is started."""

Expert = Callable[[Environment, Instance], Sequence[Trajectory | Rejection]]
"""Returns the expert's episodes of an instance, played live, or why there is none."""


def expert_id(iteration_id: str, instance: Instance, number: int = 0) -> str:
    """Return the trajectory id of one of the expert's episodes of an instance in an iteration."""
    return fingerprint("expert", iteration_id, instance.key, *([number] if number else []))


def bare_id(iteration_id: str, instance: Instance, number: int = 0) -> str:
    """Return the trajectory id of one of the expert's episodes before it has its thoughts."""
    return fingerprint("bare", iteration_id, instance.key, *([number] if number else []))


def best_experts(place: Workplace, iteration: int) -> dict[str, tuple[str, Trajectory]]:
    """Return the expert's best episode of each instance in an iteration, with its id, by instance:
    the one with the highest reward and, of equals, the shortest.
    """

    def rank(trajectory: Trajectory) -> tuple[float, int, list[str]]:
        return -trajectory.reward, len(trajectory.steps), [step.reply for step in trajectory.steps]

    played = load_trajectories(place.store, iteration_id=place.iteration_id(iteration), source="expert")
    best: dict[str, tuple[str, Trajectory]] = {}
    for key, found in sorted(played.items(), key=lambda item: rank(item[1])):
        best.setdefault(found.instance.key, (key, found))
    return best


async def expert_samples(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the expert on the training instances of an iteration and keep each episode as a sample.

    Raises:
        ConfigError: the environment has no expert, and no file of demonstrations is named.
        EnvironmentFault: the expert does not solve instances it claims to solve, or these cannot be
            played, more of them than `errors.budget` allows.
        DataFileError: the file of demonstrations is malformed, or one of them fails when it is
            replayed.
        DataFault: training and test instances overlap.
    """
    return await _demonstrate(place, iteration, samples=True)


async def demonstrate(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the expert on the training instances of an iteration. Raises as `expert_samples`."""
    return await _demonstrate(place, iteration, samples=False)


async def _demonstrate(place: Workplace, iteration: int, *, samples: bool) -> dict[str, Any]:
    instances = await separate_instances(place, iteration)
    with place.timed(STAGE, iteration) as clock:
        timer = EpisodeTimer()
        with timer.environment():
            units, rejections = await in_thread(_make, place, iteration, instances, samples=samples)
        clock.add({"environment": timer.environment_seconds})
        iteration_id = place.iteration_id(iteration)
        place.store.write(merge([*units, rejection_rows(rejections, iteration_id=iteration_id)]))
    return {"expert": len(units), "rejected": len(rejections)}


def _make(
    place: Workplace, iteration: int, instances: tuple[Instance, ...], *, samples: bool
) -> tuple[list[Rows], list[Rejection]]:
    iteration_id = place.iteration_id(iteration)
    bare = place.recipe.eto.expert.thoughts.enabled
    id_of, source = (bare_id, BARE) if bare else (expert_id, "expert")
    played = load_trajectories(place.store, iteration_id=iteration_id, source=source)
    units: list[Rows] = []
    rejections: list[Rejection] = []
    faults: list[Rejection] = []
    allowed = allowed_losses(place.recipe.errors, len(instances))
    with place.worlds() as worlds:
        experts = {env.name: expert_of(recipe, env) for recipe, env in worlds}
        for done, instance in enumerate(instances, start=1):
            check_wanted()
            place.progress(done, len(instances), "expert episodes")
            env = worlds.of(instance)
            ids = (id_of(iteration_id, instance, number) for number in count())
            known = [played[key] for key in takewhile(played.__contains__, ids)]
            found = known or _tolerant(experts[env.name], env, instance, faults, allowed)
            sound = [one for one in found if isinstance(one, Trajectory)]
            rejections += [one for one in found if isinstance(one, Rejection)]
            rows = bare_rows if bare else partial(expert_rows, env=env, samples=samples)
            units += [rows(iteration_id, one, number) for number, one in enumerate(sound)]
    if not units:
        file = place.recipe.eto.expert.file
        reasons = ", ".join(sorted({rejection.reason for rejection in rejections}))
        raise ConfigError(
            f"{file} has no sound demonstration of any training instance ({reasons}); its ids must be those of split "
            f"{place.recipe.instances.train}"
            if file
            else _no_expert(place.recipe, place.method)
        )
    return units, rejections


def _tolerant(
    expert: Expert, env: Environment, instance: Instance, faults: list[Rejection], allowed: int
) -> Sequence[Trajectory | Rejection]:
    """Return the expert's episodes of an instance, or why its world gives none. Faults of the world
    are added to `faults`; the one after as many as are `allowed` is raised.
    """
    try:
        return expert(env, instance)
    except IllTypedAnswer as error:
        return [Rejection(stage=STAGE, subject=instance.key, reason="ill-typed-answer", detail=str(error))]
    except EnvironmentFault as fault:
        if isinstance(fault, Transient) or len(faults) == allowed:
            raise
        faults.append(Rejection(stage=STAGE, subject=instance.key, reason="environment-fault", detail=str(fault)))
        return faults[-1:]


def expert_of(recipe: Recipe, env: Environment) -> Expert:
    """Return the expert of a recipe: the environment's, or the file's. Raises `DataFileError` for a
    malformed file.
    """
    config = recipe.eto.expert
    if not config.file:
        return _built_in
    known = _demonstrations(recipe, env)

    def demonstrated(env: Environment, instance: Instance) -> Sequence[Trajectory | Rejection]:
        if instance.key not in known:
            return [Rejection(stage=STAGE, subject=instance.key, reason="no-demonstration")]
        return [played(one, number) for number, one in enumerate(known[instance.key])]

    def played(one: Demonstration, number: int) -> Trajectory | Rejection:
        if config.thoughts.enabled:
            one = replace(one, replies=tuple(labelled(env, reply) for reply in one.replies))
        trajectory, fault = replayed(env, one)
        if not fault:
            return trajectory
        if config.failed_replay == "error":
            raise DataFileError(f"{fault}; leave it out of the file, or set eto.expert.failed_replay=reject")
        subject = one.instance.key + (f"#{number}" if number else "")
        return Rejection(stage=STAGE, subject=subject, reason="failed-replay", detail=fault)

    return demonstrated


def _demonstrations(recipe: Recipe, env: Environment) -> dict[str, tuple[Demonstration, ...]]:
    config = recipe.eto.expert
    world = World(env.name, recipe.environment.name)
    return read_demonstrations(Path(config.file), world=world, split=recipe.instances.train, opening=config.opening)


def expert_trajectory(env: Environment, instance: Instance) -> Trajectory | None:
    """Return the episode of the environment's expert, played live, or None where it knows no
    solution.

    Raises `EnvironmentFault` when the expert fails its own replay.
    """
    replies = answers.expert(env, instance)
    if replies is None:
        return None
    trajectory = played_live(env, instance, replies)
    if trajectory.stop is not StopReason.SUCCESS:
        raise EnvironmentFault(
            f"the expert of {env.name} does not solve {instance.key}: after {len(trajectory.steps)} steps the "
            f"environment says {_last_word(trajectory)!r}"
        )
    return trajectory


def replayed(env: Environment, demonstration: Demonstration) -> tuple[Trajectory, str]:
    """Return a demonstration played live, and how it falls short of what its file claims, empty if
    it is sound.

    A demonstration that claims the full reward must also be a success according to the environment.
    """
    trajectory = played_live(env, demonstration.instance, demonstration.replies)
    short = trajectory.reward < demonstration.reward - 1e-6
    if not short and (trajectory.success or demonstration.reward < 1):
        return trajectory, ""
    return trajectory, (
        f"{demonstration.where}: played again, the demonstration of {demonstration.instance.key} reaches reward "
        f"{trajectory.reward:g} and not {demonstration.reward:g}; after {len(trajectory.steps)} steps the environment "
        f"says {_last_word(trajectory)!r}"
    )


def _built_in(env: Environment, instance: Instance) -> Sequence[Trajectory | Rejection]:
    trajectory = expert_trajectory(env, instance)
    return [trajectory or Rejection(stage=STAGE, subject=instance.key, reason="no-expert-solution")]


def played_live(env: Environment, instance: Instance, replies: Sequence[str]) -> Trajectory:
    """Return the episode that the given replies lead to, up to the reply that ends it. Raises
    `EnvironmentFault` if there are no replies.
    """
    first_observation, outcomes = play(env, instance, replies)
    if not outcomes:
        raise EnvironmentFault(f"the expert of {env.name} says nothing about {instance.key}")
    steps = tuple(outcome.step for outcome in outcomes)
    return Trajectory.ended(instance, first_observation, steps, outcomes[-1].stop or StopReason.STEP_LIMIT)


def _last_word(trajectory: Trajectory) -> str:
    return trajectory.steps[-1].observation


def check_expert(recipe: Recipe, env: Environment, instances: Sequence[Instance], method: Method) -> None:
    """Raise `UserError` when the file of demonstrations is malformed, there is no expert without
    one, or thoughts are wanted in a world that has no place for them.
    """
    config = recipe.eto.expert
    if config.thoughts.enabled:
        check_thoughts(env)
    if config.file:
        _demonstrations(recipe, env)
    elif lacks_expert(env, instances):
        raise ConfigError(_no_expert(recipe, method))


def need_expert(env: Environment, instances: Sequence[Instance], setting: str) -> None:
    """Raise `ConfigError`, which names the setting that needs an expert, if there is none."""
    if lacks_expert(env, instances):
        raise ConfigError(f"{setting}: environment {env.name} has no expert; leave it out")


def lacks_expert(env: Environment, instances: Sequence[Instance]) -> bool:
    """Return whether an environment solves none of the first few instances itself."""
    return all(env.expert(instance) is None for instance in instances[:LOOKED_AT])


def _no_expert(recipe: Recipe, method: Method) -> str:
    return f"environment {', '.join(recipe.world_names)} has no expert; {method.without_expert}"


def bare_rows(iteration_id: str, trajectory: Trajectory, number: int) -> Rows:
    """Return the rows of one of the expert's episodes before it has its thoughts."""
    key = bare_id(iteration_id, trajectory.instance, number)
    return trajectory_rows(key, trajectory, source=BARE, iteration_id=iteration_id)


def expert_rows(iteration_id: str, trajectory: Trajectory, number: int, *, env: Environment, samples: bool) -> Rows:
    """Return the rows of one of the expert's episodes, with those of its sample if that is
    wanted.
    """
    trajectory_id = expert_id(iteration_id, trajectory.instance, number)
    episode = trajectory_rows(trajectory_id, trajectory, source="expert", iteration_id=iteration_id)
    if not samples:
        return episode
    # The expert's replies are the same in every iteration and run; the trajectory's id keeps their
    # samples apart.
    sample = Sample(
        kind=SampleKind.EXPERT,
        messages=whole_episode(env, trajectory),
        instance=trajectory.instance,
        provenance=Provenance(extra={"trajectory": trajectory_id}),
    )
    return merge(
        [episode, sample_rows(sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=trajectory_id)]
    )
