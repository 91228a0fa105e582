"""What would stop a run at once, found before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentr_core.arms import pool_stages
from agentr_core.config import Recipe
from agentr_core.errors import ConfigError
from agentr_core.expert_file import read_demonstrations
from agentr_core.json_lines import World
from agentr_core.pairs_file import read_pairs
from agentr_core.protocols import Environment, Served, Stateful
from agentr_core.stages.expert import no_expert
from agentr_core.stages.instances import held_out_instances, training_instances
from agentr_core.types import Instance
from tasks.requirements import Faults, file_requirements, model_requirements, training_requirements
from tasks.wiring import make_environment, open_store

LOOKED_AT = 20
"""Training instances that are asked for an expert before anything is started."""


def check(recipe: Recipe, *, trains: bool = True) -> None:
    """Raise `UserError` when a stage of a recipe could not do its work; every fault is told, one sentence each.

    Models, environment, splits, store, files, and what trainings need. Of model directories only headers are read;
    servers are asked for their list of models, those of environments for any answer. `trains` says whether the actor is
    to be trained, which a served one cannot be.
    """
    faults_of(recipe, trains=trains).tell()


def faults_of(recipe: Recipe, *, trains: bool = True, asks: bool = True) -> Faults:
    """Return what `check` would tell. Without `asks` no server is asked, and models may be missing.

    A model may then be missing whose shape is known, since its recipe is planned for another machine.
    """
    faults = Faults()
    if recipe.method == "base":
        return faults
    model_requirements(recipe, faults, trains=trains, asks=asks)
    if trains and recipe.model.backend == "openai":
        with faults.noted():
            raise ConfigError(
                f"model {recipe.model.label} is served, and a run trains its actor; name a model directory in "
                "model.path and give the served model a role in models, or only evaluate it with `agentr eval`"
            )
    elif trains:
        training_requirements(recipe, faults)
    file_requirements(recipe, faults)
    with faults.noted():
        _check_environment(recipe, trains=trains, asks=asks)
    with faults.noted():
        store = open_store(Path(recipe.workspace))
        if store.path.exists():
            with store.reading():
                pass
    return faults


def _check_environment(recipe: Recipe, *, trains: bool, asks: bool) -> None:
    """Raise `UserError` when the environment of a recipe lacks something, or its splits or files do."""
    env = make_environment(recipe)
    try:
        if asks and isinstance(env, Served):
            env.reach()
        if recipe.evaluation.repeats and not isinstance(env, Stateful):
            raise ConfigError(f"environment {env.name} does not tell its state; leave evaluation.repeats out")
        instances = training_instances(recipe, env, 1)
        held_out_instances(recipe, env)
        if trains and recipe.method in ("eto", "compare"):
            _check_expert(recipe, env, instances)
    finally:
        env.close()


def _check_expert(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `UserError` when an iteration wants an expert that is not there, or a file is malformed."""
    eto = recipe.eto
    world, split = World(env.name, recipe.environment.name), recipe.instances.train
    if recipe.method == "compare":
        stages = pool_stages(recipe)
        paired, wanted = "prefer" in stages, "demonstrate" in stages
    else:
        phases = {recipe.phase(iteration) for iteration in recipe.told_apart()}
        paired = "dpo" in phases
        contrast = (eto.preferences.source, eto.preferences.against) == ("exploration", "expert")
        cloned = any(eto.clones(iteration) for iteration in range(1, recipe.iterations + 1))
        wanted = cloned or (paired and contrast)
    if paired and eto.preferences.source == "file":
        read_pairs(Path(eto.preferences.file), world=world, split=split)
    if not wanted:
        return
    if eto.expert.file:
        read_demonstrations(Path(eto.expert.file), world=world, split=split, opening=eto.expert.opening)
    elif all(env.expert(instance) is None for instance in instances[:LOOKED_AT]):
        raise ConfigError(no_expert(recipe))
