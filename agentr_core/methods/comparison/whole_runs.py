"""A comparison of whole runs: each arm is a method of its own, run with each seed.

Methods that collect for themselves cannot learn from one pool. Here the arms share the model that
they begin with and the instances on which they are evaluated; how much each sampled and trained is
reported beside its scores. The run of an arm is an ordinary one, with its own iterations and
reports.
"""

from __future__ import annotations

from agentr_core.methods.comparison.arms import RUNS, arms_of
from agentr_core.recipes.recipe import OPTIONAL, Recipe
from agentr_core.runtime.place import Method, Plan


def _settle(recipe: Recipe) -> None:
    arms_of(recipe)


METHOD = Method(
    name=RUNS,
    title="comparison of whole runs",
    flow="compare",
    sections=OPTIONAL,
    stages=(),
    # The comparison itself does not collect, train or evaluate.
    plan=lambda recipe, iteration: Plan(stages=()),
    settle=_settle,
    trained=lambda recipe: [arm.recipe for arm in arms_of(recipe)],
    taken_over=(),
)
