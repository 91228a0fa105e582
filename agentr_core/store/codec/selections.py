"""The selection of the instances that a stage of the curriculum trains on, to rows and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from agentr_core.store.database import Store
from agentr_core.store.tables import Rows


@dataclass(frozen=True, slots=True)
class Selected:
    """The outcome of the selection for one instance, as in table selection; see the comments of its
    columns.
    """

    instance_id: str
    episodes: int
    correctness: float
    cost: float
    s_corr: float | None
    s_tool: float | None
    front: int | None
    crowding: float | None
    selected: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """The outcome of a planned rollout; all None if it was not played."""

    instance_id: str
    reward: float | None
    calls: int | None
    steps: int | None


def selection_rows(iteration_id: str, selected: Iterable[Selected]) -> Rows:
    """Return the rows of a selection; store them with the instances that were chosen."""
    return {"selection": [{"iteration_id": iteration_id, **asdict(one)} for one in selected]}


def load_selection(store: Store, iteration_id: str) -> list[Selected]:
    """Return the outcome for each instance, by id; none before the selection."""
    return [Selected(*row) for row in store.rows(_SELECTION, iteration_id)]


def load_rollout_outcomes(store: Store, iteration_id: str) -> list[RolloutOutcome]:
    """Return the outcomes of the rollouts that an iteration planned, in their order."""
    return [RolloutOutcome(*row) for row in store.rows(_OUTCOMES, iteration_id)]


_SELECTION = """
select instance_id, episodes, correctness, cost, s_corr, s_tool, front, crowding, selected, reason
from selection where iteration_id = ? order by instance_id
"""
_OUTCOMES = """
with called as (select owner_id, count(*)::integer as calls from tool_call where kind = 'step' group by owner_id)
select p.instance_id, t.reward, if(t.trajectory_id is null, null, coalesce(c.calls, 0)), t.num_steps
from planned_rollout p
left join trajectory t using (trajectory_id)
left join called c on c.owner_id = t.trajectory_id
where p.iteration_id = ?
order by p.position
"""
