-- Episodes that failed for good in the scores, and replies that were read through a window.

alter table node add column dropped integer;
comment on column node.dropped is 'Exchanges of the history that were left out of what the reply was drawn from (`context: window`); null in rows of versions that left out none.';
alter table step add column dropped integer;
comment on column step.dropped is 'As node.dropped.';

create or replace view v_evaluations as
with lost as (
    -- An episode that was played after all is lost no more.
    select e.evaluation_id, count(*) as lost
    from evaluation e
    join rejection x on x.stage = 'evaluate' and x.reason = 'no-reward' and starts_with(x.subject, e.evaluation_id || ':')
    where substr(x.subject, length(e.evaluation_id) + 2) not in (
        select p.instance_id || '#' || p.repeat || case when p.cut > 0 then '@' || p.cut else '' end
        from episode p where p.evaluation_id = e.evaluation_id
    )
    group by e.evaluation_id
), played as (
    select e.evaluation_id, count(*) as episodes, sum(t.success::int) as successes, sum(t.reward) as rewards,
        avg(t.num_steps) as steps, avg(t.num_steps) filter (t.success) as steps_to_success
    from episode e join trajectory t using (trajectory_id)
    group by e.evaluation_id
), counted as (
    select e.evaluation_id, p.steps, p.steps_to_success, coalesce(p.successes, 0) as successes, coalesce(p.rewards, 0) as rewards,
        coalesce(l.lost, 0) as lost,
        coalesce(p.episodes, 0) + case when (r.config->>'$.errors.count_as') = 'zero' then coalesce(l.lost, 0) else 0 end as n
    from evaluation e
    join iteration i using (iteration_id)
    join run r using (run_id)
    left join played p using (evaluation_id)
    left join lost l using (evaluation_id)
), shares as (
    select *, successes / nullif(n, 0) as p, rewards / nullif(n, 0) as reward from counted
), bounds as (
    -- Wilson's interval at 95%: z = 1.959964
    select *, (p + 1.9207294 / n) / (1 + 3.8414588 / n) as centre,
        1.959964 * sqrt(p * (1 - p) / n + 0.9603647 / (n * n)) / (1 + 3.8414588 / n) as half
    from shares
)
select r.run_id, r.recipe, i.iteration, e.name as evaluation, e.split, e.evaluation_id, e.checkpoint_id, e.finished,
    b.p as success, greatest(0, b.centre - b.half) as success_low, least(1, b.centre + b.half) as success_high,
    b.reward, b.steps, b.steps_to_success, b.n as episodes, b.lost
from evaluation e
join iteration i using (iteration_id)
join run r using (run_id)
left join bounds b using (evaluation_id)
order by r.started_at, r.run_id, i.iteration, e.name, e.split;
comment on view v_evaluations is 'Success share with its 95% Wilson interval and mean reward of every evaluation.';
comment on column v_evaluations.steps is 'Mean steps of all episodes that were played, failed ones included.';
comment on column v_evaluations.steps_to_success is 'Mean steps of the successful episodes; null when there was none.';
comment on column v_evaluations.episodes is 'Episodes in the means: those that were played and, with `errors.count_as: zero`, those that failed for good, as failures with reward 0.';
comment on column v_evaluations.lost is 'Episodes that failed for good.';
