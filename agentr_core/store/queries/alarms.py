"""The measures that alarms watch: columns of the steps of group RL, and counts of stages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentr_core.store.database import Store
from agentr_core.store.queries.runs import GATHERED_SOURCES

WATCHED_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "entropy": "entropy",
        "clip_share": "clip_share",
        "sampler_kl": "sampler_kl",
        "contrast": "mixed_share",
        "gradient_norm": "grad_norm",
        "cut_replies": "cut_share",
    }
)
"""Columns of table rl_step by the rules of alarms that watch them."""


def step_measures(store: Store, iteration_id: str, step: int) -> list[dict[str, float | None]]:
    """Return the watched measures, by rule, of each step of group RL before `step`, in order."""
    return [dict(zip(WATCHED_COLUMNS, row, strict=True)) for row in store.rows(_STEPS, iteration_id, step)]


def has_improved(store: Store, iteration_id: str) -> bool:
    """Return whether the training of an iteration improved by its own measure: whether its mean
    over the last three steps beats that over the first three. The measure is the mean reward in
    group RL, elsewhere the loss. False with fewer than four steps.
    """
    for first_mean, last_mean, num_steps in store.rows(_REWARDS, iteration_id):
        if num_steps:
            return bool(num_steps > 3 and last_mean > first_mean)
    return any(
        num_steps > 3 and last_mean < first_mean
        for first_mean, last_mean, num_steps in store.rows(_LOSSES, iteration_id)
    )


def held_out_gain_interval(store: Store, iteration_id: str) -> tuple[float, float] | None:
    """Return the 95% interval of the difference between the held-out success of an iteration's
    model and that of the one before; None where it was not measured.
    """
    return next(((low, high) for low, high in store.rows(_GAIN, iteration_id)), None)


def share_counts(store: Store, iteration_id: str) -> dict[str, tuple[int, int]]:
    """Return counts of an iteration by name, as pairs of total and part: replies that are cut or
    empty, by purpose (`cut collected`); unreadable verdicts (`unread verdicts`); and judged paths
    on which the judge names the same first error, or none, as the search tree or the oracle
    (`agrees tree`). Counts whose total is 0 are left out.
    """
    return {name: (total, part) for name, total, part in store.rows(_SHARES, iteration_id) if total}


_STEPS = f"""
select {", ".join(WATCHED_COLUMNS.values())} from rl_step where iteration_id = ? and step < ? order by step
"""
_REWARDS = """
with numbered as (
    select reward, row_number() over (order by step) as place, count(*) over () as n from rl_step where iteration_id = ?
)
select avg(reward) filter (place <= 3), avg(reward) filter (place > n - 3), coalesce(any_value(n), 0) from numbered
"""
_LOSSES = """
with numbered as (
    select loss, row_number() over (order by step) as place, count(*) over () as n
    from training_step join iteration on checkpoint_id = checkpoint_out where iteration_id = ?
)
select avg(loss) filter (place <= 3), avg(loss) filter (place > n - 3), coalesce(any_value(n), 0) from numbered
"""
# Where a model is compared with the base alone, the base is the one before.
_GAIN = """
select m.low, m.high from metric m join evaluation e on m.scope = 'evaluation' and m.scope_id = e.evaluation_id
where e.iteration_id = ? and e.name = 'test' and e.finished and m.low is not null
    and m.name in ('gain_over_base', 'gain_over_previous')
order by m.name = 'gain_over_base' limit 1
"""
# Of a reply without a finish reason it is not known whether it was cut.
_SHARES = f"""
with said as (
    select if(g.kind = 'judgement', 'judged', 'collected') as purpose, g.reply, g.finish_reason
    from generation g join tree t on t.tree_id = g.owner_id
    where t.iteration_id = $1 and g.kind in ('node', 'judgement')
    union all
    select if(t.source in {GATHERED_SOURCES}, 'collected', 'evaluated'), g.reply, g.finish_reason
    from generation g join trajectory t on t.trajectory_id = g.owner_id
    where t.iteration_id = $1 and g.kind = 'step' and t.source in ('episode', 'rollout', 'validation', 'flywheel')
        and g.seed is not null
), judged as (
    select distinct p.tree_id, v.node_index, v.verdict from verdict v join pair p using (pair_id)
    where p.iteration_id = $1
), audit as (
    from v_critic_audit where (run_id, iteration) = (select (run_id, iteration) from iteration where iteration_id = $1)
)
select 'cut ' || purpose, count(finish_reason), count(*) filter (finish_reason = 'length') from said group by purpose
union all
select 'empty ' || purpose, count(*), count(*) filter (trim(reply) = '') from said group by purpose
union all
select 'unread verdicts', count(*), count(*) filter (verdict = 'unparsable') from judged
union all
select 'agrees tree', count(*), count(*) filter (judge_error is not distinct from tree_error) from audit
union all
select 'agrees oracle', count(*), count(*) filter (judge_error is not distinct from oracle_error) from audit
where has_oracle
"""
