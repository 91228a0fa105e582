-- Scores in SQL and in the viewer as reports have them: intervals over what the episodes are variants of, and the reward that
-- an episode ending in a disaster counts as.

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
    select e.evaluation_id, count(*) as episodes, sum(t.success::int) as successes,
        sum(t.reward) filter (t.stop is distinct from 'disaster') as rewards, count(*) filter (t.stop = 'disaster') as disasters,
        avg(t.num_steps) as steps, avg(t.num_steps) filter (t.success) as steps_to_success
    from episode e join trajectory t using (trajectory_id)
    group by e.evaluation_id
), counted as (
    select e.evaluation_id, p.steps, p.steps_to_success, coalesce(p.successes, 0) as successes,
        coalesce(p.rewards, 0)
            + coalesce(p.disasters, 0) * coalesce((r.config->>'$.evaluation.disaster_counts')::double, 0) as rewards,
        coalesce(l.lost, 0) as lost,
        coalesce(p.episodes, 0) + case when (r.config->>'$.errors.count_as') = 'zero' then coalesce(l.lost, 0) else 0 end as n
    from evaluation e
    join iteration i using (iteration_id)
    join run r using (run_id)
    left join played p using (evaluation_id)
    left join lost l using (evaluation_id)
), shares as (
    select *, successes / nullif(n, 0) as p, rewards / nullif(n, 0) as reward from counted
), wilson as (
    -- At 95%: z = 1.959964
    select *, (p + 1.9207294 / n) / (1 + 3.8414588 / n) as centre,
        1.959964 * sqrt(p * (1 - p) / n + 0.9603647 / (n * n)) / (1 + 3.8414588 / n) as half
    from shares
), measured as (
    -- success of older stores has Wilson's interval in every case.
    select scope_id as evaluation_id, arg_min({'low': low, 'high': high}, name = 'success') as bounds
    from metric where scope = 'evaluation' and name in ('success', 'success_clustered') and low is not null
    group by scope_id
)
select r.run_id, r.recipe, i.iteration, e.name as evaluation, e.split, e.evaluation_id, e.checkpoint_id, e.finished,
    w.p as success,
    if(e.finished and m.bounds is not null, m.bounds.low, greatest(0, w.centre - w.half)) as success_low,
    if(e.finished and m.bounds is not null, m.bounds.high, least(1, w.centre + w.half)) as success_high,
    w.reward, w.steps, w.steps_to_success, w.n as episodes, w.lost
from evaluation e
join iteration i using (iteration_id)
join run r using (run_id)
left join wilson w using (evaluation_id)
left join measured m using (evaluation_id)
order by r.started_at, r.run_id, i.iteration, e.name, e.split;
comment on view v_evaluations is 'Success share with its 95% interval and mean reward of every evaluation.';
comment on column v_evaluations.finished is 'Whether all its episodes have ended; while they have not, the numbers are of those that have.';
comment on column v_evaluations.success_low is 'Of the 95% interval that reports show: Wilson''s, or clustered where several episodes are of one instance, or of one under different names. Wilson''s over episodes until the evaluation is finished.';
comment on column v_evaluations.reward is 'Mean final reward; an episode that ended in a disaster counts as `evaluation.disaster_counts`.';
comment on column v_evaluations.steps is 'Mean steps of all episodes that were played, failed ones included.';
comment on column v_evaluations.steps_to_success is 'Mean steps of the successful episodes; null when there was none.';
comment on column v_evaluations.episodes is 'Episodes in the means: those that were played and, with `errors.count_as: zero`, those that failed for good, as failures with reward 0.';
comment on column v_evaluations.lost is 'Episodes that failed for good.';

create or replace view v_iterations as
select v.run_id, v.recipe, v.iteration, v.evaluation, v.split, v.checkpoint_id,
    v.success, v.success_low, v.success_high, v.reward, v.steps, v.steps_to_success, v.episodes,
    x.success as revision_success, x.success_low as revision_success_low, x.success_high as revision_success_high,
    x.reward as revision_reward, coalesce(x.episodes, 0) as revision_episodes, v.finished, x.finished as revision_finished
from v_evaluations v
left join v_evaluations x
    on x.evaluation = 'revision_test' and v.evaluation = 'test' and (x.run_id, x.iteration, x.split, x.checkpoint_id) = (v.run_id, v.iteration, v.split, v.checkpoint_id)
where v.evaluation <> 'revision_test'
order by v.run_id, v.iteration, v.evaluation <> 'test', v.evaluation;
comment on view v_iterations is 'How good the policy is after each iteration (0: the model the run starts from), one row for each evaluation set; revision_ columns, in the rows of set test: recovery from failed prefixes.';
comment on column v_iterations.success_low is 'As in v_evaluations.';
comment on column v_iterations.reward is 'As in v_evaluations.';
comment on column v_iterations.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_iterations.steps_to_success is 'Mean steps of the successful episodes; null when there was none.';
comment on column v_iterations.finished is 'As in v_evaluations.';
