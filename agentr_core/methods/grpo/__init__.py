"""GRPO: groups of episodes of one instance, rewards compared within each, a clipped policy
gradient.

Sources: arXiv 2402.03300; 2503.14476 and 2503.20783 for its variants.
"""

from __future__ import annotations

from agentr_core.evaluation.metrics import Forecast, Headroom, Prospect, mixed_probability, prospect
from agentr_core.methods.catalogue import (
    EVALUATE,
    EVALUATE_BASE,
    FUNNEL_OF_GROUPS,
    GROUPS_OF_RUN,
    REINFORCE,
    STEPS_OF_GROUPS,
    group_demands,
    group_relative,
    group_rollout_config,
    groups_phrase,
    reinforce_stage,
    weight_swap_faults,
)
from agentr_core.recipes.agent_r import CritiqueConfig
from agentr_core.recipes.grpo import grpo_faults
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import Method, Plan, lazy_import

# A forecast of how many groups of a recipe's size would have contrast with a given policy.


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Return how many of an iteration's groups would have contrast if all instances were drawn
    equally often, and whether GRPO can learn from that. A curriculum finds more.

    Groups that are all won or all lost have advantages of 0.
    """
    group_size = recipe.grpo.num_generations
    num_groups = recipe.grpo.steps * recipe.grpo.groups
    mixed_groups = headroom.rates.total(
        num_groups, lambda _, run: mixed_probability(run, group_size), max_per_instance=1
    )
    return prospect(
        "grpo",
        [Forecast(name="mixed_groups", expected=mixed_groups)],
        needed_forecast="mixed_groups",
        shortage_reason=f"{group_size} episodes of an instance nearly always all win or all lose",
    )


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration, which has no dataset."""
    return Plan(
        stages=(reinforce_stage(recipe.grpo), EVALUATE),
        training=group_relative(recipe, anew=recipe.training.start_from == "base"),
        funnel=FUNNEL_OF_GROUPS,
    )


def _describe(recipe: Recipe, num_train: int, num_test: int) -> list[str]:
    return [f"each iteration: {groups_phrase(recipe, num_train)}, then {num_test} held-out episodes"]


def _faults(recipe: Recipe) -> list[str]:
    faults = grpo_faults(recipe.grpo, recipe.training, recipe.data) + weight_swap_faults(recipe)
    if recipe.context == "window":
        faults.append(
            "context: method grpo trains whole conversations, not what a window leaves of them; set summary, or leave "
            "it out"
        )
    if recipe.critique != CritiqueConfig() and recipe.grpo.revision_cut != "verdict":
        faults.append("critique: has no use without grpo.revision_cut: verdict; set that, or leave the section out")
    elif recipe.critique.scan_from != CritiqueConfig().scan_from:
        faults.append("critique.scan_from: an episode is judged from its first step on; leave it out")
    if recipe.context == "summary" and recipe.grpo.credit != "episode":
        faults.append(
            f"grpo.credit: {recipe.grpo.credit} compares what was done in one state, and a summary does nothing there; "
            "leave it out with context: summary"
        )
    return faults


METHOD = Method(
    name="grpo",
    title="GRPO",
    sections=("grpo", "critique", "iterations"),
    stages=(REINFORCE, EVALUATE),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=_faults,
    describe=_describe,
    demands=lambda recipe, train, test: group_demands(recipe, test),
    rollout_config=group_rollout_config,
    prospect=lazy_import("agentr_core.methods.grpo:foresee"),
    report=(STEPS_OF_GROUPS, GROUPS_OF_RUN),
)
