"""What a recipe asks for, and the id of its run, by the method that the recipe names."""

from __future__ import annotations

from typing import Any

from agentr_core.methods.table import method_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime import start


def run_id_of(recipe: Recipe) -> str:
    """Return the id of the run of a recipe."""
    return start.run_id_of(recipe, method_of(recipe))


def asked_for(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe asks for as plain data."""
    return start.identity_settings(recipe, method_of(recipe))
