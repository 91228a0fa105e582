"""Names and scores of evaluations, and what changed from one to another."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from agentr_core.store.database import Store
from agentr_core.store.queries.listings import DIFFERENCES


class EvaluationName(NamedTuple):
    """The name of an evaluation, and the run and iteration whose model it is of."""

    evaluation_id: str
    name: str
    split: str
    run_id: str
    recipe: str
    iteration: int


def evaluation_names(store: Store, ids: Collection[str]) -> dict[str, EvaluationName]:
    """Return the names of the given evaluations, by id; those that are not stored are left out."""
    rows = store.rows(
        "select e.evaluation_id, e.name, e.split, i.run_id, r.recipe, i.iteration from evaluation e "
        "join iteration i using (iteration_id) join run r using (run_id) where e.evaluation_id in (select unnest($1))",
        list(ids),
    )
    return {row[0]: EvaluationName(*row) for row in rows}


class EvaluationScore(NamedTuple):
    """The score of an evaluation: the success rate of its episodes, and their mean reward."""

    run_id: str
    name: str
    iteration: int
    success: float
    reward: float


def evaluation_scores(store: Store, run_ids: Collection[str]) -> list[EvaluationScore]:
    """Return the scores of the finished evaluations of some runs, the test set first, then by name
    and iteration.
    """
    rows = store.rows(
        "select run_id, evaluation, iteration, success, reward from v_evaluations "
        "where success is not null and run_id in (select unnest($1)) "
        "order by evaluation <> 'test', evaluation, iteration",
        list(run_ids),
    )
    return [EvaluationScore(*row) for row in rows]


def outcome_changes(store: Store, before_id: str, after_id: str) -> dict[str, int]:
    """Return how many of the episodes in both evaluations were `gained` (a success only after),
    `lost` (only before) or the `same`, by these words.
    """
    kinds = ("gained", "lost", "same")
    filters = DIFFERENCES.filters
    # All in one query: each reads the same episodes, and the page of the list shows them besides.
    conditions = (filters["change"].replace("$value", f"'{kind}'") for kind in kinds)
    sql = (
        f"select {', '.join(f'count(*) filter ({condition})' for condition in conditions)} from {DIFFERENCES.source} "
        f"where {filters['before'].replace('$value', '$1')} and {filters['after'].replace('$value', '$2')}"
    )
    return next(
        (dict(zip(kinds, row, strict=True)) for row in store.rows(sql, before_id, after_id)), dict.fromkeys(kinds, 0)
    )
