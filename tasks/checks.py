"""What would stop a run at once, found before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

from agentr_core.config import ModelConfig, Recipe
from agentr_core.errors import ConfigError, EndpointError, ModelFault
from agentr_core.models.checkpoint_dir import check_model_directory
from agentr_core.models.openai_endpoint import context_length, endpoint
from agentr_core.stages.instances import test_instances, training_instances
from tasks.wiring import make_environment, open_store


def check(recipe: Recipe, *, trains: bool = True) -> None:
    """Raise `UserError` when the models, the splits or the store of a recipe cannot be used.

    Of model directories only headers are read; servers are asked for their list of models. `trains` says whether the
    actor is to be trained, which a served one cannot be.
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
    env = make_environment(recipe)
    try:
        training_instances(recipe, env, 1)
        test_instances(recipe, env)
    finally:
        env.close()
    store = open_store(Path(recipe.workspace))
    if store.path.exists():
        with store.reading():
            pass


def _check_model(model: ModelConfig) -> None:
    if model.backend != "openai":
        check_model_directory(Path(model.path))
        return
    try:
        context_length(endpoint(model.server, os.environ), model.server, model.context_length)
    except ModelFault as error:
        raise EndpointError(str(error)) from None
