"""Phrases that several methods use in their lines of `agentr plan`."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.recipes.grpo import unread_online
from agentr_core.recipes.recipe import Recipe

MOST_NAMED = 10
"""The most iterations like the last value that are each listed."""


def by_iteration(recipe: Recipe, values: Sequence[str]) -> str:
    """Return a value for each iteration as text; for a long run, only those that differ, and "from
    then on".
    """
    more = recipe.iterations - len(values)
    if more <= MOST_NAMED:
        return ", ".join([*values, *[values[-1]] * more])
    return f"{', '.join(values)} from then on"


def of_groups(recipe: Recipe, train: int) -> str:
    """Return what group RL does in an iteration as a phrase: its steps, groups and instances."""
    grpo = recipe.grpo
    steps = "1 step" if grpo.steps == 1 else f"{grpo.steps} steps"
    said = f"{steps} of {grpo.groups} groups of {grpo.num_generations} episodes of {train} instances"
    if grpo.revision_share:
        said += f", at most {grpo.revision_share:.0%} of the groups after a failed beginning of their instance"
    if grpo.expert_share:
        said += f", at most {grpo.expert_share:.0%} after the expert's first steps, where nothing was won"
    return said


def of_unread(recipe: Recipe) -> list[str]:
    """Return a line about the settings of the recipe's supervised training that its iterations `rl`
    do without, if there are any.
    """
    unread = unread_online(recipe.training)
    return [f"an iteration rl does not read {', '.join(unread)}"] if unread else []
