"""What would stop a run at once, found before anything is started."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from agentr_core.config import ModelConfig, Recipe
from agentr_core.errors import ConfigError, DataFault, EndpointError, ModelDirectoryError, ModelFault
from agentr_core.methods.table import method_of, plans_of
from agentr_core.models.checkpoint_dir import check_model_directory
from agentr_core.models.openai_endpoint import context_length, endpoint
from agentr_core.protocols import Served, Stateful
from agentr_core.rendering import load_renderer
from agentr_core.stages.instances import held_out_instances, training_instances
from agentr_core.types import Message
from tasks.wiring import make_environment, open_store


def check(recipe: Recipe, *, trains: bool = True) -> None:
    """Raise `UserError` when the models, the environment, the splits or the store of a recipe cannot be used.

    Of model directories only headers are read; servers are asked for their list of models, those of environments for
    any answer. `trains` says whether the actor is to be trained, which a served one cannot be.
    """
    if not method_of(recipe).acts:
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
        if trains:
            for stage in dict.fromkeys(stage for plan in plans_of(recipe) for stage in plan.stages):
                stage.check(recipe, env, instances)
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


def _check_model(model: ModelConfig) -> None:
    if model.backend != "openai":
        check_model_directory(Path(model.path))
        return
    try:
        context_length(endpoint(model.server, os.environ), model.server, model.context_length)
    except ModelFault as error:
        raise EndpointError(str(error)) from None
