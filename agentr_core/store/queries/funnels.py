"""The counts of each stage of data construction: how many items passed, and how many were rejected
and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class TreeCounts:
    """The counts of what an iteration that grows trees made; `led` are trees with steps of the
    expert, `paths` those that ended.
    """

    trees: int
    led: int
    paths: int
    pairs: int
    critiques: int
    spliced: int
    verified: int


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """The number of episodes of one source that an iteration has, and of successes among them."""

    played: int
    solved: int


def tree_counts(store: Store, iteration_id: str) -> TreeCounts | None:
    """Return the counts of what an iteration made from its trees; None before it has begun."""
    rows = store.rows(
        "select trees, led, leaves, pairs, critiques, spliced, verified from v_funnel f, (select "
        "count(distinct tree_id) filter (n.duplicates = 0) as led from node n join tree t using (tree_id) "
        "where t.iteration_id = $1) where f.iteration_id = $1",
        iteration_id,
    )
    return next((TreeCounts(*row) for row in rows), None)


def episode_counts(store: Store, iteration_id: str, source: str) -> EpisodeCounts:
    """Return how many episodes of a source an iteration has."""
    (counts,) = store.rows(
        "select count(*), count(*) filter (success) from trajectory where iteration_id = ? and source = ?",
        iteration_id,
        source,
    ) or [(0, 0)]
    return EpisodeCounts(*counts)


def count_preferences(store: Store, iteration_id: str) -> int:
    """Return how many preference pairs an iteration made."""
    return store.count("select count(*) from preference where iteration_id = ?", iteration_id)


def count_samples(store: Store, iteration_id: str) -> int:
    """Return how many samples an iteration made."""
    return store.count("select count(*) from sample where iteration_id = ?", iteration_id)


def count_revised_pairs(store: Store, iteration_id: str) -> int:
    """Return how many pairs of an iteration became revision samples."""
    return store.count(
        "select count(distinct pair_id) from sample where iteration_id = ? and kind = 'revision'", iteration_id
    )


def count_trained_rows(store: Store, iteration_id: str) -> int:
    """Return how many rows the dataset of an iteration has."""
    return store.count(
        "select count(*) from dataset d join dataset_row using (dataset_id) where d.iteration_id = ?",
        iteration_id,
    )


def rejection_counts(store: Store, iteration_id: str) -> dict[str, dict[str, int]]:
    """Return the number of rejections in an iteration by stage and reason, the most frequent reason
    first.
    """
    found: dict[str, dict[str, int]] = {}
    for stage, reason, count in store.rows(
        "select stage, reason, count(*) from rejection where iteration_id = ? "
        "group by all order by count(*) desc, reason",
        iteration_id,
    ):
        found.setdefault(stage, {})[reason] = count
    return found
