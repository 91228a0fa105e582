"""Agent-R: tree search, the first error of each bad path, spliced revisions, supervised training.

Source: arXiv 2501.11425. With `data.use: expert` it is behaviour cloning, and nothing is searched.
"""

from __future__ import annotations

from agentr_core.methods.catalogue import (
    CLONE,
    COLLECT,
    CRITIQUE,
    DATASET,
    EVALUATE,
    EVALUATE_BASE,
    GOOD_PATHS,
    SPLICE,
    TRAIN,
)
from agentr_core.methods.objectives import supervised
from agentr_core.methods.wording import by_iteration
from agentr_core.recipes import Recipe
from agentr_core.runtime.description import Method, Plan, Stage, imported


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return what an iteration does: how its samples are made goes by `data.use`."""
    made: dict[str, tuple[Stage, ...]] = {"expert": (CLONE,), "good": (COLLECT, GOOD_PATHS)}
    return Plan(
        stages=(*made.get(recipe.data.use, (COLLECT, CRITIQUE, SPLICE)), DATASET, TRAIN, EVALUATE),
        objective=supervised(recipe, iteration),
    )


def _describe(recipe: Recipe, train: int, test: int) -> list[str]:
    if _clones(recipe):
        return [f"each iteration: the expert's episodes of {train} instances, then {test} held-out episodes"]
    return [
        f"each iteration: {train} trees, then {test} held-out episodes",
        f"alpha by iteration: {by_iteration(recipe, [f'{recipe.alpha(i):g}' for i in recipe.told_apart()])}",
    ]


def _sampled(recipe: Recipe, train: int) -> dict[str, tuple[int, int]]:
    """Splices that are played on are not counted."""
    if _clones(recipe):
        return {}
    search, critique = recipe.search, recipe.critique
    leaves = train * search.dives * search.width
    bad = min(leaves, train * recipe.pairs.per_tree) if recipe.pairs.per_tree else leaves
    return {
        "search": (leaves * (search.depth + 1), search.max_new_tokens),
        "critique": (bad * search.depth * critique.votes, critique.max_new_tokens),
    }


def _clones(recipe: Recipe) -> bool:
    return recipe.data.use == "expert"


def _faults(recipe: Recipe) -> list[str]:
    if recipe.data.use not in ("successes", "rft", "preferences"):
        return []
    return [f"data.use: {recipe.data.use} is for the arms of method compare; choose another"]


METHOD = Method(
    name="agent-r",
    title="Agent-R",
    sections=("search", "critique", "pairs", "splice", "iterations"),
    stages=(COLLECT, CRITIQUE, SPLICE, DATASET, TRAIN, EVALUATE),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=_faults,
    describe=_describe,
    sampled=_sampled,
    funnel=imported("agentr_core.methods.agent_r.report:funnel"),
    revises=lambda recipe: not _clones(recipe),
    without_expert="data.use must be revision, good or both",
)
