"""Makes the tiny base model that other recipes begin with; it has no iterations."""

from __future__ import annotations

from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import BaseConfig
from agentr_core.runtime.place import Method, Plan

_CRAFTING = (
    "judge_share",
    "careless_share",
    "forget_share",
    "repeat_share",
    "mistake_share",
    "shaped_share",
    "depths",
    "max_steps",
    "long_share",
    "judge_depths",
    "procedural_share",
    "rename_share",
    "drills",
    "drill_questions",
)


def _faults(recipe: Recipe) -> list[str]:
    base, plain = recipe.base, BaseConfig()
    heads = base.hidden_size // base.head_dim
    faults = [] if base.output else ["base.output: name the directory in which the finished model goes"]
    if base.hidden_size % base.head_dim:
        faults.append(
            f"base.hidden_size: {base.hidden_size} is no multiple of base.head_dim, {base.head_dim}; change one of them"
        )
    elif base.num_key_value_heads and heads % base.num_key_value_heads:
        faults.append(
            f"base.num_key_value_heads: {heads} query heads cannot share {base.num_key_value_heads} evenly; "
            f"take a divisor of {heads}"
        )
    if base.questions is not None:
        faults += [
            f"base.{name}: TextCraft's curriculum has it, and base.questions asks for another; leave it out"
            for name in _CRAFTING
            if getattr(base, name) != getattr(plain, name)
        ]
    return faults


METHOD = Method(
    name="base",
    title="a base model",
    flow="base-model",
    stages=(),
    plan=lambda recipe, iteration: Plan(stages=()),
    acts=False,
    faults=_faults,
)
