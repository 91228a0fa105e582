"""What a workspace holds at a glance: its runs, and the iterations of one of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from agentr_core.store.at_work import tell_runs_at_work
from agentr_core.store.database import Store


class RunLine(NamedTuple):
    """A run in the list of runs; times are in UTC."""

    run_id: str
    recipe: str
    method: str
    status: str
    started_at: datetime
    finished_at: datetime | None
    iterations: int
    pool: str | None
    """The run whose samples it is trained on, if it is an arm of a comparison."""


class IterationLine(NamedTuple):
    """An iteration of a run, and the number of rows of each kind that it made."""

    iteration_id: str
    iteration: int
    status: str
    checkpoint_out: str | None
    dataset_id: str | None
    trees: int
    trajectories: int
    pairs: int
    samples: int
    preferences: int
    groups: int
    rejections: int


class EvaluationLine(NamedTuple):
    """An evaluation of a run with what was measured: shares in [0, 1], None until it is
    finished.
    """

    evaluation_id: str
    iteration: int
    name: str
    split: str
    finished: bool
    episodes: int
    success: float | None
    low: float | None
    high: float | None
    reward: float | None
    steps: float | None


class EventLine(NamedTuple):
    """Errors of one class in one phase of a stage of a run."""

    stage: str
    level: str
    error: str
    phase: str
    times: int
    message: str
    """The message of one of them."""


def run_lines(store: Store) -> list[RunLine]:
    """Return the runs of a workspace, the newest first."""
    return _run_lines(store, "")


def run_line(store: Store, run_id: str) -> RunLine | None:
    """Return a run; None if it is not stored."""
    return next(iter(_run_lines(store, run_id)), None)


def iteration_lines(store: Store, run_id: str) -> list[IterationLine]:
    """Return the iterations of a run in their order."""
    return [IterationLine(*row) for row in _rows_now(store, _ITERATIONS, run_id)]


def evaluation_lines(store: Store, run_id: str) -> list[EvaluationLine]:
    """Return the evaluations of a run, those of one name together, by iteration."""
    return [EvaluationLine(*row) for row in store.rows(_EVALUATIONS, run_id)]


def event_lines(store: Store, run_id: str) -> list[EventLine]:
    """Return the errors of a run, the most frequent first."""
    return [EventLine(*row) for row in store.rows(_EVENTS, run_id)]


def _run_lines(store: Store, run_id: str) -> list[RunLine]:
    return [RunLine(*row) for row in _rows_now(store, _RUNS, run_id)]


def _rows_now(store: Store, sql: str, run_id: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query that tells which runs are under way; none if there is no store."""
    if not store.path.exists():
        return []
    with store.reading() as con:
        tell_runs_at_work(con, store.path.parent)
        found: list[tuple[Any, ...]] = con.execute(sql, [run_id]).fetchall()
    return found


_RUNS = """
select run_id, recipe, method, status, started_at, finished_at,
    (select count(*) from iteration i where i.run_id = r.run_id and i.iteration > 0),
    (select coalesce(nullif(config->>'$.compare.samples', ''), nullif(config->>'$.compare.pool', ''))
        from run o where o.run_id = r.run_id)
from v_runs r where $1 in ('', run_id) order by started_at desc, run_id
"""
_ITERATIONS = """
with mine as (
    select i.* replace (case
        when i.status in ('finished', 'failed') or r.status in ('running', 'evaluating') then i.status
        when r.status = 'collecting' then r.status
        -- A finished run does more only for a forecast (of its first model) or to gather for a further iteration.
        when r.status = 'finished' then if(i.iteration = 0, r.status, 'collecting')
        else 'interrupted' end as status)
    from iteration i join v_runs r using (run_id) where run_id = ?
),
made as (
    select 'tree' as kind, iteration_id from tree
    union all select 'trajectory', coalesce(t.iteration_id, e.iteration_id) from trajectory t
        left join evaluation e using (evaluation_id)
    union all select 'pair', iteration_id from pair
    union all select 'sample', iteration_id from sample
    union all select 'preference', iteration_id from preference
    union all select 'group', iteration_id from rl_group
    union all select 'rejection', iteration_id from rejection
),
counts as (
    select iteration_id, kind, count(*) as n from made
    where iteration_id in (select iteration_id from mine) group by all
)
select m.iteration_id, m.iteration, m.status, m.checkpoint_out,
    (select any_value(dataset_id) from dataset d where d.iteration_id = m.iteration_id),
    coalesce(sum(n) filter (kind = 'tree'), 0)::bigint, coalesce(sum(n) filter (kind = 'trajectory'), 0)::bigint,
    coalesce(sum(n) filter (kind = 'pair'), 0)::bigint, coalesce(sum(n) filter (kind = 'sample'), 0)::bigint,
    coalesce(sum(n) filter (kind = 'preference'), 0)::bigint, coalesce(sum(n) filter (kind = 'group'), 0)::bigint,
    coalesce(sum(n) filter (kind = 'rejection'), 0)::bigint
from mine m left join counts using (iteration_id)
group by all order by m.iteration
"""
_EVALUATIONS = """
select evaluation_id, iteration, evaluation, split, finished, episodes, success, success_low, success_high,
    reward, steps
from v_evaluations where run_id = ? order by evaluation, split, iteration
"""
_EVENTS = """
select stage, level, "class", phase, count(*), any_value(message) from event where run_id = ?
group by all order by count(*) desc limit 20
"""
