"""A forecast of what groups of a recipe's size would yield with a given policy."""

from __future__ import annotations

from agentr_core.evaluation.headroom import Forecast, Headroom, Prospect, prospect
from agentr_core.evaluation.pass_rates import mixed
from agentr_core.recipes.recipe import Recipe


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Return what the groups of an iteration would yield, were all instances drawn equally often,
    and whether GRPO can learn from it. A curriculum finds more.

    Groups that are all won or all lost have no advantage.
    """
    size = recipe.grpo.num_generations
    groups = recipe.grpo.steps * recipe.grpo.groups
    expected = headroom.rates.total(groups, lambda _, run: mixed(run, size), most=1)
    return prospect(
        "grpo",
        [Forecast(name="mixed_groups", expected=expected)],
        needs="mixed_groups",
        short=f"{size} episodes of an instance nearly always all win or all lose",
    )
