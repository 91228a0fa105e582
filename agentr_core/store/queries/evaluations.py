"""Evaluations by name, and what changed from one to another."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from agentr_core.store.database import Store
from agentr_core.store.queries.listings import DIFFERENCES, listed


class EvaluationName(NamedTuple):
    """What an evaluation is of."""

    evaluation_id: str
    name: str
    split: str
    run_id: str
    recipe: str
    iteration: int


def evaluation_names(store: Store, ids: Collection[str]) -> dict[str, EvaluationName]:
    """Return what some evaluations are of, by id; those that are not stored are left out."""
    rows = store.rows(
        "select e.evaluation_id, e.name, e.split, i.run_id, r.recipe, i.iteration from evaluation e "
        "join iteration i using (iteration_id) join run r using (run_id) where e.evaluation_id in (select unnest($1))",
        list(ids),
    )
    return {row[0]: EvaluationName(*row) for row in rows}


def changes(store: Store, before: str, after: str) -> dict[str, int]:
    """Return how many episodes that two evaluations both played were gained, lost, and ended the
    same.
    """
    kinds = ("gained", "lost", "same")
    return {
        kind: listed(store, DIFFERENCES, {"before": before, "after": after, "change": kind}, offset=0, limit=0).total
        for kind in kinds
    }
