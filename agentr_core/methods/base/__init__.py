"""No wheel: the tiny base model is made, which other recipes begin with."""

from __future__ import annotations

from agentr_core.recipes import Recipe
from agentr_core.runtime.description import Method, Plan


def _faults(recipe: Recipe) -> list[str]:
    return [] if recipe.base.output else ["base.output: name the directory in which the finished model goes"]


METHOD = Method(
    name="base",
    title="a base model",
    flow="base-model",
    stages=(),
    plan=lambda recipe, iteration: Plan(stages=()),
    acts=False,
    faults=_faults,
    funnel=lambda place, iteration: (),
)
