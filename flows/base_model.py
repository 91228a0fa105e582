"""The flow that makes the tiny base model."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from agentr_core.errors import ConfigError
from agentr_core.methods.table import method_of
from agentr_core.recipes.recipe import Recipe
from flows.parameters import name_unknown
from tasks.base_model import pretrain
from tasks.wiring import load_recipe


@flow(name="base-model", flow_run_name="{recipe}", on_crashed=[name_unknown])
async def make_base_from(recipe: str, overrides: list[str] | None = None) -> str:
    """Train the base model of a recipe file and return the path of its directory.

    Args:
        recipe: path of the recipe file.
        overrides: any field of the recipe, each as `section.field=value`.

    Raises `ConfigError` for a recipe of another method, whose section `base` nobody wrote.
    """
    parsed = load_recipe(Path(recipe), overrides or [])
    method = method_of(parsed)
    if method.flow != "base-model":
        raise ConfigError(f"recipe {recipe} is of method {method.name} and makes no base model; name another")
    return await make_base(parsed)


async def make_base(recipe: Recipe) -> str:
    """Train the base model of a parsed recipe within a flow run."""
    return await pretrain(recipe)
