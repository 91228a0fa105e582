"""The trajectories that a flywheel made, by operator."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class OperatorCount:
    """The counts of what an operator made in an iteration; `fresh` made the trajectories before the
    first round.

    `saved` is how many fewer tool calls right children have than their parents, on average; None if
    there are none. `samples` counts the trajectories that became samples.
    """

    operator: str
    children: int
    right: int
    calls: float
    saved: float | None
    samples: int


def operator_counts(store: Store, iteration_id: str) -> list[OperatorCount]:
    """Return the counts of each operator, `fresh` first, then by name."""
    return [OperatorCount(*row) for row in store.rows(_OPERATORS, iteration_id)]


_OPERATORS = """
with member as (
    select t.trajectory_id, t.success, count(c.number) as calls
    from trajectory t
    left join tool_call c on c.kind = 'step' and c.owner_id = t.trajectory_id
    where t.iteration_id = ? and t.source = 'flywheel'
    group by all
)
select coalesce(d.operator, 'fresh') as made_by, count(*), count(*) filter (m.success), avg(m.calls),
    avg(p.calls - m.calls) filter (m.success),
    count(*) filter (m.trajectory_id in (select trajectory_id from sample where trajectory_id is not null))
from member m
left join derivation d on d.child_id = m.trajectory_id
left join member p on p.trajectory_id = d.parent_id
group by made_by
order by made_by <> 'fresh', made_by
"""
