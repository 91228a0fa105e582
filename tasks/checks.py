"""What would stop a run at once, found before anything is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from agentr_core.arms import pool_stages
from agentr_core.config import ModelConfig, Recipe
from agentr_core.errors import ConfigError, DataFault, EndpointError, ModelDirectoryError, ModelFault
from agentr_core.expert_file import read_demonstrations
from agentr_core.json_lines import World
from agentr_core.models.checkpoint_dir import check_model_directory
from agentr_core.models.openai_endpoint import context_length, endpoint
from agentr_core.pairs_file import read_pairs
from agentr_core.protocols import Environment, Served, Stateful
from agentr_core.rendering import load_renderer
from agentr_core.stages.expert import no_expert
from agentr_core.stages.instances import held_out_instances, training_instances
from agentr_core.types import Instance, Message
from tasks.wiring import make_environment, open_store

LOOKED_AT = 20
"""Training instances that are asked for an expert before anything is started."""


def check(recipe: Recipe, *, trains: bool = True) -> None:
    """Raise `UserError` when the models, the environment, the splits or the store of a recipe cannot be used.

    Of model directories only headers are read; servers are asked for their list of models, those of environments for
    any answer. `trains` says whether the actor is to be trained, which a served one cannot be.
    """
    if recipe.method == "base":
        return
    if trains and recipe.model.backend == "openai":
        raise ConfigError(
            f"model {recipe.model.label} is served, and a run trains its actor; name a model directory in model.path "
            "and give the served model a role in models, or only evaluate it with `agentr eval`"
        )
    for model in recipe.own_models().values():
        _check_model(model)
    if trains:
        _check_template(Path(recipe.model.path))
    env = make_environment(recipe)
    try:
        if isinstance(env, Served):
            env.reach()
        if recipe.evaluation.repeats and not isinstance(env, Stateful):
            raise ConfigError(f"environment {env.name} does not tell its state; leave evaluation.repeats out")
        instances = training_instances(recipe, env, 1)
        held_out_instances(recipe, env)
        if trains and recipe.method in ("eto", "compare"):
            _check_expert(recipe, env, instances)
    finally:
        env.close()
    store = open_store(Path(recipe.workspace))
    if store.path.exists():
        with store.reading():
            pass


def _check_template(path: Path) -> None:
    """Raise `ModelDirectoryError` when a conversation of several turns could be sampled, but not trained on."""
    turns = [Message(role=role, text="Go on.", train=role == "assistant") for role in ("user", "assistant") * 2]
    try:
        load_renderer(path, at=datetime.now(UTC)).render_sample(turns)
    except DataFault as fault:
        raise ModelDirectoryError(f"the model in {path} cannot be trained: {fault}") from fault


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


def _check_model(model: ModelConfig) -> None:
    if model.backend != "openai":
        check_model_directory(Path(model.path))
        return
    try:
        context_length(endpoint(model.server, os.environ), model.server, model.context_length)
    except ModelFault as error:
        raise EndpointError(str(error)) from None
