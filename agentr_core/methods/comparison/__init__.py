"""Comparison: one pool of trajectories, and each arm trained on what it takes from the pool.

The run of the comparison makes the pool and trains nothing; the run of an arm makes nothing and
trains on the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.methods.catalogue import (
    CLONE,
    COLLECT,
    CRITIQUE,
    DATASET,
    EVALUATE,
    EVALUATE_BASE,
    EXPLORE_AND_KEEP,
    FUNNEL_OF_EXPERT,
    FUNNEL_OF_TREES,
    GOOD_PATHS,
    IN_TREES,
    PAIRS,
    PREFER,
    REVISION_SAMPLES,
    REVISIONS,
    SPLICE,
    THINK_AND_CLONE,
    TRAIN_ON_PAIRS,
    VOICED,
    cloning,
    preference,
    splice_stage,
    supervised,
)
from agentr_core.methods.comparison.arms import OF_TREES, TAKEN, arms_of
from agentr_core.recipes.data import DataConfig, Use
from agentr_core.recipes.eto import eto_faults
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.place import Method, Plan, Stage, imported
from agentr_core.types import Sample, SampleKind

FUNNEL_OF_POOL = replace(FUNNEL_OF_TREES, title="From the pool to training rows")


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of the one iteration of a comparison, or of one of its arms."""
    if not recipe.compare.pool:
        return Plan(stages=pool_stages(recipe), funnel=FUNNEL_OF_TREES)
    use = recipe.data.use
    training = preference(recipe, 0) if use == "preferences" else supervised(recipe, iteration)
    return Plan(
        stages=(DATASET, TRAIN_ON_PAIRS, EVALUATE),
        training=training,
        phase=f"data.use {use}",
        takes=taking(use),
        funnel=FUNNEL_OF_EXPERT if use == "expert" else FUNNEL_OF_POOL,
    )


def pool_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages that make the pool on which a comparison trains its arms, in order."""
    arms = arms_of(recipe)
    uses = {arm.recipe.data.use for arm in arms if arm.samples is None}
    return stages_for(recipe, uses, lends_trees=any(arm.samples for arm in arms))


def stages_for(recipe: Recipe, uses: Collection[str], *, lends_trees: bool) -> tuple[Stage, ...]:
    """Return the stages that make what the arms of some uses train on, in order.

    Args:
        lends_trees: whether other runs make samples of its trees.
    """
    kinds = frozenset[str]().union(*(TAKEN[use] for use in uses))
    made = recipe.eto.preferences
    paired = made.source if "preferences" in uses else None
    searched = not OF_TREES.isdisjoint(kinds)
    judged = recipe.data.use != "good"
    cloned = "expert" in kinds or (paired == "exploration" and made.against == "expert")
    wanted = {
        COLLECT: searched or lends_trees or (paired == "trees" and not made.trees),
        CRITIQUE: searched and judged,
        splice_stage(recipe.splice) if judged else GOOD_PATHS: searched,
        **dict.fromkeys(cloning(recipe.eto), cloned),
        EXPLORE_AND_KEEP: "successes" in kinds or paired == "exploration",
        PREFER: paired is not None,
    }
    return tuple(stage for stage, needed in wanted.items() if needed)


def taking(use: Use) -> Callable[[Sample], bool]:
    """Return a test for the samples of a pool that an arm trains on; for preferences, which are
    pairs, no sample passes.

    A good path of a tree and a success of an explored episode have the same kind, but only the
    former has a tree.
    """

    def takes(sample: Sample) -> bool:
        explored = sample.kind == SampleKind.GOOD and not sample.provenance.tree_id
        return ("successes" if explored else str(sample.kind)) in TAKEN[use]

    return takes


def _identify(recipe: Recipe, plain: dict[str, Any]) -> None:
    """Remove what the arms may change, which does not affect the pool."""
    if not recipe.compare.pool:
        del plain["training"], plain["eto"]["dpo"]
        # Fields at their defaults are left out, so that existing ids stay the same.
        use, windowed = recipe.data.use, recipe.data.windowed
        plain["data"] = use if windowed == DataConfig().windowed else {"use": use, "windowed": windowed}


def _faults(recipe: Recipe) -> list[str]:
    # A comparison grows trees itself, and need not be told which run has them.
    faults = eto_faults(recipe.eto, own_trees=True)
    if recipe.data.suffixes == "exchanged" and "revision" not in TAKEN[recipe.data.use]:
        faults.append(f"data.suffixes: exchanges those of revisions, and data.use {recipe.data.use} has none")
    if recipe.data.replay:
        faults.append("data.replay: a comparison has no earlier iterations; leave it out")
    return faults


def _settle(recipe: Recipe) -> None:
    if recipe.compare.trees:
        raise ConfigError(f"recipe {recipe.name}: compare.trees: comparisons set it for their samples; leave it out")
    arms_of(recipe)


def _trained(recipe: Recipe) -> list[Recipe]:
    return [recipe] if recipe.compare.pool else [arm.recipe for arm in arms_of(recipe)]


METHOD = Method(
    name="compare",
    title="comparison",
    flow="compare",
    sections=("search", "critique", "pairs", "splice", "eto", "compare"),
    stages=(
        COLLECT,
        CRITIQUE,
        SPLICE,
        CLONE,
        THINK_AND_CLONE,
        EXPLORE_AND_KEEP,
        PREFER,
        DATASET,
        TRAIN_ON_PAIRS,
        EVALUATE,
    ),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=_faults,
    settle=_settle,
    trained=_trained,
    identify=_identify,
    acting=IN_TREES,
    voiced=VOICED,
    drawn_on=imported("agentr_core.methods.comparison.drawn:drawn_on"),
    report=(REVISIONS, PAIRS, REVISION_SAMPLES),
    without_expert=(
        "name a file of demonstrations in eto.expert.file, or do without it: no arm with data.use expert, both+expert "
        "or rft, and eto.preferences.against own"
    ),
)
