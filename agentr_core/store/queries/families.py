"""The trajectories that a flywheel made, by operator."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.recipes.curriculum import Counts
from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class OperatorCount:
    """The counts of what an operator made in an iteration; `fresh` made the trajectories before the
    first round.

    `cost` is the mean number of tool calls, or of steps, and `saved` how many fewer right children
    have than their parents, on average; None if there are none. `samples` counts the trajectories
    that became samples.
    """

    operator: str
    children: int
    right: int
    cost: float
    saved: float | None
    samples: int


def operator_counts(store: Store, iteration_id: str, counts: Counts) -> list[OperatorCount]:
    """Return the counts of each operator, `fresh` first, then by name; `counts` says what a
    trajectory is charged for.
    """
    return [OperatorCount(*row) for row in store.rows(_OPERATORS, iteration_id, counts)]


_OPERATORS = """
with member as (
    select t.trajectory_id, t.success, if($2 = 'steps', any_value(t.num_steps), count(c.number)) as cost
    from trajectory t
    left join tool_call c on c.kind = 'step' and c.owner_id = t.trajectory_id
    where t.iteration_id = $1 and t.source = 'flywheel'
    group by t.trajectory_id, t.success
)
select coalesce(d.operator, 'fresh') as made_by, count(*), count(*) filter (m.success), avg(m.cost),
    avg(p.cost - m.cost) filter (m.success),
    count(*) filter (m.trajectory_id in (select trajectory_id from sample where trajectory_id is not null))
from member m
left join derivation d on d.child_id = m.trajectory_id
left join member p on p.trajectory_id = d.parent_id
group by made_by
order by made_by <> 'fresh', made_by
"""
