"""A failed episode and its neighbours: a won episode of its instance, and the failures before and
after it.
"""

from __future__ import annotations

from typing import NamedTuple

from agentr_core.store.database import Store
from agentr_core.store.queries.trees import TrajectoryHead


class WonEpisode(NamedTuple):
    """A won episode of the same instance as a failed one. `kin` says how close the two are: `group`
    and `evaluation` if they share it, `expert` for the expert's episode, otherwise `other`.
    """

    trajectory_id: str
    kin: str
    source: str
    iteration: int | None
    actions: list[str]


class Neighbours(NamedTuple):
    """The failed episodes before and after a failed one, among those of the same evaluation, or of
    the same source and iteration.
    """

    previous_id: str | None
    next_id: str | None
    num_before: int
    """The number of failed episodes before it."""
    total: int


def closest_win(store: Store, head: TrajectoryHead) -> WonEpisode | None:
    """Return the won episode of the same instance that is best compared with a failed one: of the
    closest kin (group, evaluation, other, expert), the one that shares the most first actions with
    it, then the shortest; None if nobody won.
    """
    return next(
        (
            WonEpisode(*row)
            for row in store.rows(
                _WIN,
                head.trajectory_id,
                head.instance_id,
                head.evaluation_id,
                head.group_iteration,
                head.group_step,
                head.group_number,
            )
        ),
        None,
    )


def neighbour_failures(store: Store, trajectory_id: str) -> Neighbours:
    """Return the failed episodes before and after a stored one, in the order in which they were
    stored.
    """
    ((previous_id, next_id, num_before, total),) = store.rows(_FAILURES, trajectory_id)
    return Neighbours(previous_id, next_id, num_before, total)


# An episode that begins like this one shows best where they part.
_WIN = """
with mine as (
    select [s.action for s in steps] as actions from trajectory where trajectory_id = $1
), won as (
    select t.trajectory_id, t.source, [s.action for s in t.steps] as actions, i.iteration, t.num_steps,
        case when r.step is not null and (r.iteration_id, r.step, r.number) = ($4, $5, $6) then 'group'
            when t.evaluation_id = $3 then 'evaluation' when t.source = 'expert' then 'expert' else 'other' end as kin
    from trajectory t
    left join evaluation e using (evaluation_id)
    left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
    left join rl_rollout r using (trajectory_id)
    where t.instance_id = $2 and t.success and t.trajectory_id <> $1 and t.source not in ('bare', 'ungraded')
)
select won.trajectory_id, kin, source, iteration, won.actions
from won, mine
order by list_position(['group', 'evaluation', 'other', 'expert'], kin),
    len(list_filter(range(1, num_steps + 1), lambda n: won.actions[:n] = mine.actions[:n])) desc,
    num_steps, trajectory_id
limit 1
"""
_FAILURES = """
with mine as (
    select trajectory_id, created_at, source, evaluation_id, iteration_id from trajectory where trajectory_id = $1
), failure as (
    select t.trajectory_id, t.created_at, (t.created_at, t.trajectory_id) < (m.created_at, m.trajectory_id) as earlier
    from trajectory t join mine m
        on t.source = m.source and t.evaluation_id is not distinct from m.evaluation_id
        and t.iteration_id is not distinct from m.iteration_id
    where not t.success and t.trajectory_id <> $1
)
select arg_max(trajectory_id, (created_at, trajectory_id)) filter (earlier),
    arg_min(trajectory_id, (created_at, trajectory_id)) filter (not earlier),
    count(*) filter (earlier), count(*)
from failure
"""
