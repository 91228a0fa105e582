"""A forecast of what groups of a recipe's size would yield with a given policy."""

from __future__ import annotations

from agentr_core.evaluation.headroom import Forecast, Headroom, Prospect, prospect
from agentr_core.evaluation.pass_rates import mixed
from agentr_core.recipes import Recipe


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Return what one group for each instance would yield, and whether GRPO can learn from it.

    Groups that are all won or all lost have no advantage.
    """
    size = recipe.grpo.num_generations
    expected = headroom.rates.total(headroom.instances, lambda _, run: mixed(run, size))
    return prospect(
        "grpo",
        [Forecast(name="mixed_groups", expected=expected)],
        needs="mixed_groups",
        short=f"{size} episodes of an instance nearly always all win or all lose",
    )
