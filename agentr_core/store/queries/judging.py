"""The judge's verdicts on the pairs of an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentr_core.store.database import Store
from agentr_core.types import Verdict


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """The judge's verdict on one step of the bad path of a pair."""

    pair_id: str
    tree_id: str
    bad_leaf: int
    """The last node of the path."""
    position: int
    """The number of the step in the path, from 0."""
    node: int
    verdict: Verdict


class PathAudit(NamedTuple):
    """The first error of a judged path according to judge, tree and oracle, each a position from 0,
    or None for none; one row of view v_critic_audit; see the comments of its columns.
    """

    depth: int | None
    judge: int | None
    tree: int | None
    oracle: int | None
    has_oracle: bool


class JudgedStep(NamedTuple):
    """A judged step and what the tree says about it; one row of view v_critic_steps."""

    verdict: Verdict
    value_drop: float | None
    """How much the value of its siblings exceeds its own; None if no sibling was visited."""


def path_audits(store: Store, iteration_id: str) -> list[PathAudit]:
    """Return what is known about the first errors of the judged paths of an iteration."""
    return [PathAudit(*row) for row in store.rows(_AUDITS, iteration_id)]


def judged_steps(store: Store, iteration_id: str) -> list[JudgedStep]:
    """Return the judged steps of an iteration, each node once."""
    return [JudgedStep(Verdict(verdict), drop) for verdict, drop in store.rows(_STEPS, iteration_id)]


def verdict_counts(store: Store, iteration_id: str) -> dict[str, int]:
    """Return how many judged nodes of an iteration have each verdict.

    Pairs that share a bad path share its verdicts: each judged node counts once.
    """
    rows = store.rows(
        "select verdict, count(distinct (p.tree_id, v.node_index)) from verdict v join pair p using (pair_id) "
        "where p.iteration_id = ? group by verdict order by verdict",
        iteration_id,
    )
    return dict(rows)


def first_errors(store: Store, iteration_id: str) -> list[int | None]:
    """Return the position of the first error of each judged pair of an iteration, None if there is
    none.
    """
    rows = store.rows(
        "select c.first_error from critique c join pair p using (pair_id) where p.iteration_id = ?", iteration_id
    )
    return [first for (first,) in rows]


def revision_lengths(store: Store, iteration_id: str) -> dict[int, int]:
    """Return the number of revised pairs by how many unshared steps of the bad path they keep.

    With an error within the shared steps, none of these are kept.
    """
    return dict(store.rows(_LENGTHS, iteration_id))


def pair_verdicts(store: Store, iteration_id: str) -> list[PairVerdict]:
    """Return every verdict on the pairs of an iteration, sorted by pair and position."""
    return [
        PairVerdict(pair, tree, leaf, position, node, Verdict(verdict))
        for pair, tree, leaf, position, node, verdict in store.rows(_VERDICTS, iteration_id)
    ]


_LENGTHS = """
select greatest(0, c.first_error - p.shared_steps + 1) as length, count(*)
from critique c join pair p using (pair_id)
where p.iteration_id = $1 and c.first_error is not null
    and p.pair_id in (select pair_id from sample where iteration_id = $1 and kind = 'revision')
group by length
order by length
"""
_VERDICTS = """
select p.pair_id, p.tree_id, p.bad_leaf, v.position, v.node_index, v.verdict
from verdict v join pair p using (pair_id)
where p.iteration_id = ?
order by all
"""
_AUDITS = """
select depth, judge_error, tree_error, oracle_error, has_oracle
from v_critic_audit
where (run_id, iteration) = (select (run_id, iteration) from iteration where iteration_id = ?)
"""
_STEPS = """
select verdict, value_drop
from v_critic_steps
where (run_id, iteration) = (select (run_id, iteration) from iteration where iteration_id = ?)
"""
