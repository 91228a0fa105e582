"""The flow that makes the tiny base model."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from agentr_core.recipes import Recipe
from tasks.base_model import pretrain
from tasks.wiring import load_recipe


@flow(name="base-model", flow_run_name="{recipe}")
async def make_base_from(recipe: str, overrides: list[str] | None = None) -> str:
    """Train the base model of a recipe file and return the path of its directory."""
    return await make_base(load_recipe(Path(recipe), overrides or []))


async def make_base(recipe: Recipe) -> str:
    """Train the base model of a parsed recipe within a flow run."""
    return await pretrain(recipe)
