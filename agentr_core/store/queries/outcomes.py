"""How episodes ended: why they stopped, what was refused, and which were lost to errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.store.database import Store
from agentr_core.store.queries.published import GATHERED


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """The number of errors of one class in one phase, and of the units that one of them ended for
    good, each counted once, however often it was tried anew.
    """

    error: str
    phase: str
    count: int
    lost: int


@dataclass(frozen=True, slots=True)
class InstanceTraits:
    """What an environment says about an instance; `origin` is the key of the instance it is a
    variant of, or its own.
    """

    depth: int | None
    origin: str


def collected_stops(store: Store, iteration_id: str) -> dict[str, int]:
    """Return how many paths of trees and rollouts of an iteration ended for each reason."""
    return dict(store.rows(_COLLECTED, iteration_id))


def evaluated_stops(store: Store, evaluation_ids: Sequence[str]) -> dict[str, int]:
    """Return how many episodes of some evaluations ended for each reason; those of evaluations that
    are not finished, which have no score either, are left out.
    """
    rows = store.rows(
        "select t.stop, count(*) from episode e join trajectory t using (trajectory_id) "
        "join evaluation v on v.evaluation_id = e.evaluation_id "
        "where e.evaluation_id in (select unnest(?)) and v.finished group by t.stop",
        list(evaluation_ids),
    )
    return dict(rows)


def error_counts(store: Store, iteration_id: str) -> list[ErrorCount]:
    """Return the errors of an iteration by class and phase."""
    rows = store.rows(
        "select \"class\", phase, count(*), count(distinct subject) filter (level = 'error') from event "
        "where iteration_id = ? group by all order by all",
        iteration_id,
    )
    return [ErrorCount(*row) for row in rows]


def failed_subjects(store: Store, iteration_id: str, stage: str) -> list[str]:
    """Return the names of the subjects that had an error in a stage of an iteration."""
    rows = store.rows("select distinct subject from event where iteration_id = ? and stage = ?", iteration_id, stage)
    return [subject for (subject,) in rows]


def refusals(store: Store, iteration_id: str, *, limit: int) -> dict[str, int]:
    """Return how many collected actions were refused, by the first three words of what the
    environment said, not counting a tag around it; the `limit` most frequent ones.
    """
    return dict(store.rows(_REFUSED, iteration_id, limit))


def rejected_subjects(store: Store, *, stage: str, reason: str, prefix: str) -> list[str]:
    """Return the subjects of rejections that begin with a prefix, sorted."""
    rows = store.rows(
        "select subject from rejection where stage = ? and reason = ? and starts_with(subject, ?) order by subject",
        stage,
        reason,
        prefix,
    )
    return [subject for (subject,) in rows]


def instance_traits(store: Store, keys: Sequence[str]) -> dict[str, InstanceTraits]:
    """Return the stored traits of instances, by their key."""
    rows = store.rows(
        "select instance_id, depth, coalesce(origin_id, instance_id) from instance "
        "where instance_id in (select unnest(?))",
        list(keys),
    )
    return {key: InstanceTraits(*traits) for key, *traits in rows}


_COLLECTED = f"""
select stop, count(*) from (
    select n.stop from node n join tree t using (tree_id) where t.iteration_id = $1 and n.stop is not null
    union all
    select stop from trajectory where iteration_id = $1 and source in {GATHERED}
)
group by stop
"""
_REFUSED = f"""
with refused as (
    select n.observation_id from node n join tree t using (tree_id) where t.iteration_id = $1 and not n.valid
    union all
    select s.observation_id from step s join trajectory t using (trajectory_id)
    where t.iteration_id = $1 and t.source in {GATHERED} and not s.valid
)
select array_to_string(regexp_extract_all(regexp_replace(o.text, '^\\s*<\\w+>', ''), '\\S+')[1:3], ' ') as opening,
    count(*)
from refused r join text o on o.text_id = r.observation_id
group by opening
order by count(*) desc, opening
limit $2
"""
