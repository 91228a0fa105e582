"""A comparison of whole runs: each arm is a run of a method of its own, with each seed.

Methods that collect for themselves cannot learn from one pool. What is equal here is the model
that they begin with and the instances on which they are evaluated; how much each sampled and
trained is told beside its scores. The run of an arm is an ordinary one, with iterations and reports
of its own.
"""

from __future__ import annotations

from agentr_core.methods.comparison.arms import RUNS, arms_of
from agentr_core.recipes import Recipe
from agentr_core.recipes.recipe import OPTIONAL
from agentr_core.runtime.description import Method, Plan


def _plan(recipe: Recipe, iteration: int) -> Plan:
    """Return no stages: the comparison itself collects, trains and evaluates nothing."""
    return Plan(stages=())


def _settle(recipe: Recipe) -> None:
    arms_of(recipe)


def _trained(recipe: Recipe) -> list[Recipe]:
    return [arm.recipe for arm in arms_of(recipe)]


METHOD = Method(
    name=RUNS,
    title="comparison of whole runs",
    flow="compare",
    sections=OPTIONAL,
    stages=(),
    plan=_plan,
    settle=_settle,
    trained=_trained,
    taken_over=(),
)
