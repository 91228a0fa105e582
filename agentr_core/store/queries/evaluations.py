"""Evaluations, how far they are, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """One evaluation of the checkpoint that an iteration made (0: the base model)."""

    evaluation_id: str
    iteration: int
    name: str
    split: str


@dataclass(frozen=True, slots=True)
class StoredMetric:
    """One number with its 95% interval; `low` and `high` are None where it has none."""

    name: str
    value: float
    low: float | None
    high: float | None
    n: int


def finished_evaluations(store: Store, run_id: str, *, after: int) -> list[StoredEvaluation]:
    """Return the finished evaluations of a run's iterations after a given one."""
    return _finished(store, "i.run_id = ? and i.iteration > ?", run_id, after)


def evaluations_of(store: Store, checkpoint_id: str) -> list[StoredEvaluation]:
    """Return the finished evaluations of a checkpoint."""
    return _finished(store, "e.checkpoint_id = ?", checkpoint_id)


def _finished(store: Store, where: str, *params: str | int) -> list[StoredEvaluation]:
    rows = store.rows(
        "select e.evaluation_id, i.iteration, e.name, e.split from evaluation e join iteration i using (iteration_id) "
        f"where {where} and e.finished order by i.iteration, e.name",
        *params,
    )
    return [StoredEvaluation(*row) for row in rows]


def is_finished(store: Store, evaluation_id: str) -> bool:
    """Return whether all episodes of an evaluation have ended."""
    return bool(store.count("select count(*) from evaluation where evaluation_id = ? and finished", evaluation_id))


def unfinished_evaluations(store: Store, evaluation_ids: Sequence[str]) -> dict[str, int]:
    """Return how many episodes have ended of those among some evaluations that are not finished, by
    evaluation; evaluations that have not begun are left out.
    """
    rows = store.rows(
        "select e.evaluation_id, count(p.evaluation_id) from evaluation e left join episode p using (evaluation_id) "
        "where e.evaluation_id in (select unnest(?)) and not e.finished group by all",
        list(evaluation_ids),
    )
    return {key: int(episodes) for key, episodes in rows}


def evaluation_metrics(store: Store, evaluation_id: str) -> list[StoredMetric]:
    """Return the metrics of a finished evaluation; none while it is not finished."""
    rows = store.rows(
        "select m.name, m.value, m.low, m.high, m.n from metric m join evaluation e on e.evaluation_id = m.scope_id "
        "where m.scope = 'evaluation' and e.evaluation_id = ? and e.finished",
        evaluation_id,
    )
    return [StoredMetric(*row) for row in rows]
