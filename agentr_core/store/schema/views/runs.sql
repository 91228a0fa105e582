-- Runs, and how good their models are.

-- A killed process could not record its end: what says "running" may have stopped. Whoever works on a run holds its lock;
-- agentr sets the variable runs_at_work before it asks what needs it.
create view v_runs as
select run_id, recipe, method, (config->>'$.seed')::bigint as seed,
    if((config->>'$.model.backend') = 'openai', config->>'$.model.server.model', config->>'$.model.path') as model,
    if(status in ('running', 'evaluating') and not list_contains(getvariable('runs_at_work')::varchar[], run_id), 'interrupted', status) as status,
    started_at, finished_at
from run order by started_at, run_id;
comment on view v_runs is 'The runs, and which of them a process is working on.';
comment on column v_runs.model is 'Directory of the model that the run begins with, or its name on a server.';
comment on column v_runs.status is 'As of table run, but interrupted where no process of this machine works on the run any more. Where agentr does not ask, as in the shell of DuckDB, it is that of table run.';

create view v_evaluations as
with lost as (
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
    select *, (p + 1.9207294 / n) / (1 + 3.8414588 / n) as centre,
        1.959964 * sqrt(p * (1 - p) / n + 0.9603647 / (n * n)) / (1 + 3.8414588 / n) as half
    from shares
), measured as (
    select scope_id as evaluation_id, arg_min({'low': low, 'high': high}, name = 'success') as bounds
    from metric where scope = 'evaluation' and name in ('success', 'success_clustered') and low is not null
    group by scope_id
)
select r.run_id, r.recipe, i.iteration, e.name as evaluation, e.split, e.evaluation_id, e.checkpoint_id, e.finished,
    w.p as success, if(w.p is not null, coalesce(m.bounds.low, greatest(0, w.centre - w.half)), null) as success_low,
    if(w.p is not null, coalesce(m.bounds.high, least(1, w.centre + w.half)), null) as success_high,
    w.reward, w.steps, w.steps_to_success, c.n as episodes, c.lost
from evaluation e
join iteration i using (iteration_id)
join run r using (run_id)
join counted c using (evaluation_id)
-- Episodes that are won end first: while some are still played, a mean would say too much.
left join wilson w on e.finished and w.evaluation_id = e.evaluation_id
left join measured m on e.finished and m.evaluation_id = e.evaluation_id
order by r.started_at, r.run_id, i.iteration, e.name, e.split;
comment on view v_evaluations is 'Success share with its 95% interval and mean reward of every evaluation; null until it is finished, since episodes that are won end first.';
comment on column v_evaluations.finished is 'Whether all its episodes have ended.';
comment on column v_evaluations.success_low is 'Of the 95% interval that reports show: Wilson''s, or clustered where several episodes are of one instance, or of one under different names.';
comment on column v_evaluations.reward is 'Mean final reward; an episode that ended in a disaster counts as `evaluation.disaster_counts`.';
comment on column v_evaluations.steps is 'Mean steps of all episodes that were played, failed ones included.';
comment on column v_evaluations.steps_to_success is 'Mean steps of the successful episodes; null when there was none.';
comment on column v_evaluations.episodes is 'Episodes in the means, or so far: those that were played and, with `errors.count_as: zero`, those that failed for good, as failures with reward 0.';
comment on column v_evaluations.lost is 'Episodes that failed for good.';

create view v_iterations as
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

create view v_episodes as
select r.recipe, i.run_id, i.iteration, e.name as evaluation, e.split, x.environment, p.instance_id, x.depth, x.origin_id, p.repeat, p.cut,
    t.success::integer as success, t.reward, t.stop, t.num_steps, p.invalid_actions, p.sampling_seconds, p.environment_seconds,
    p.trajectory_id, p.evaluation_id, e.checkpoint_id
from episode p
join evaluation e using (evaluation_id)
join trajectory t using (trajectory_id)
join iteration i on i.iteration_id = e.iteration_id
join run r using (run_id)
left join instance x on x.instance_id = p.instance_id
order by r.started_at, i.run_id, i.iteration, e.name, p.instance_id, p.repeat, p.cut;
comment on view v_episodes is 'The episodes of all evaluations: which model played which instance, and how it ended.';
comment on column v_episodes.iteration is 'The one that made the model; 0: the model that the run begins with.';
comment on column v_episodes.success is 'As in v_trajectories.';
comment on column v_episodes.depth is 'Difficulty class, where the environment has one.';
comment on column v_episodes.cut is 'Steps that were replayed before the model took over; 0 but in a revision test.';
comment on column v_episodes.num_steps is 'Steps, replayed ones included.';

create view v_metrics as
select r.run_id, r.recipe, i.iteration, e.name as evaluation, e.split,
    nullif(regexp_extract(m.name, '^world-(.+?)/', 1), '') as world,
    regexp_replace(m.name, '^(?:world-.+?/)?(?:depth-[^/]*/)?', '') as metric,
    try_cast(regexp_extract(m.name, '(?:^|/)depth-([^/]*)/[^/]+$', 1) as integer) as depth,
    m.value, m.low, m.high, m.n, e.evaluation_id
from metric m
join evaluation e on e.evaluation_id = m.scope_id
join iteration i using (iteration_id)
join run r using (run_id)
where m.scope = 'evaluation'
order by r.started_at, r.run_id, i.iteration, e.name, world nulls first, depth nulls first, metric;
comment on view v_metrics is 'What was measured of every evaluation, as reports show it: one row a number.';
comment on column v_metrics.metric is 'success, reward, pass@k, mean@k, reward_within@k, gain_over_base and so on; the docstring of agentr_core/stages/evaluate.py has them all.';
comment on column v_metrics.world is 'The one of several worlds of which it is; null: of all episodes.';
comment on column v_metrics.depth is 'The difficulty class of which it is; null: of all episodes.';
comment on column v_metrics.low is 'Of the 95% interval; null where the number has none.';
comment on column v_metrics.n is 'Episodes, or instances where a number is over these.';

-- The revision tests of two runs may go on from different failures of the same instance: episodes are the same where the steps
-- that they were given are, too.
create view v_comparisons as
with given as (
    select p.trajectory_id, [step.reply for step in t.steps[:p.cut]] as replies
    from (select distinct trajectory_id, cut from episode where cut > 0) p join trajectory t using (trajectory_id)
), played as (
    select i.run_id, i.iteration, e.name as evaluation, e.split, p.instance_id, p.repeat, p.cut, coalesce(g.replies, []) as given,
        t.success, t.reward
    from episode p
    join evaluation e using (evaluation_id)
    join trajectory t using (trajectory_id)
    join iteration i on i.iteration_id = e.iteration_id
    left join given g using (trajectory_id)
    where e.finished
)
select a.run_id, a.iteration, b.run_id as other_run_id, b.iteration as other_iteration, a.evaluation, a.split, count(*) as episodes,
    avg(a.success::integer) as success, avg(b.success::integer) as other_success,
    avg(a.success::integer - b.success::integer) as gain, count(*) filter (a.success and not b.success) as won,
    count(*) filter (b.success and not a.success) as lost, avg(a.reward - b.reward) as reward_gain
from played a
join played b using (evaluation, split, instance_id, repeat, cut, given)
where (a.run_id, a.iteration) <> (b.run_id, b.iteration)
group by a.run_id, a.iteration, b.run_id, b.iteration, a.evaluation, a.split;
comment on view v_comparisons is 'Each two models that played the same episodes of a set to the end, side by side; `agentr report RUN RUN` has the intervals.';
comment on column v_comparisons.episodes is 'Episodes that both played: same instance and number and, in a revision test, the same replayed steps.';
comment on column v_comparisons.gain is 'success - other_success.';
comment on column v_comparisons.won is 'Episodes that it won and the other did not.';
comment on column v_comparisons.lost is 'Episodes that the other won and it did not.';

create view v_arms as
with trained as (
    select scope_id as iteration_id, value::bigint as trained_tokens from metric where scope = 'iteration' and name = 'trained_tokens'
), spent as (
    select checkpoint_id, max(seconds) as seconds from training_step group by checkpoint_id
)
select p.run_id as comparison_id, p.recipe as comparison, substr(r.recipe, length(p.recipe) + 2) as arm, (r.config->>'$.seed')::bigint as seed,
    (r.config->>'$.training.max_tokens')::bigint as max_tokens,
    coalesce((r.config->>'$.training.max_seconds')::double, 0) as max_seconds, (r.config->>'$.data.use') as trains_on, r.run_id, n.status,
    d.dataset_id, d.hash as dataset_hash, i.checkpoint_out as checkpoint_id, t.trained_tokens, e.seconds,
    v.success, v.reward, v.steps, v.steps_to_success, v.episodes, v.revision_success, v.revision_episodes
from run r
join v_runs n on n.run_id = r.run_id
join run p on p.run_id = (r.config->>'$.compare.pool')
left join iteration i on i.run_id = r.run_id and i.iteration = 1
left join dataset d on d.iteration_id = i.iteration_id
left join trained t on t.iteration_id = i.iteration_id
left join spent e on e.checkpoint_id = i.checkpoint_out
left join v_iterations v on v.run_id = r.run_id and v.iteration = 1 and v.evaluation = 'test'
order by p.run_id, list_position(json_keys(p.config, '$.compare.arms'), substr(r.recipe, length(p.recipe) + 2)), arm, max_tokens, max_seconds, seed;
comment on view v_arms is 'The arms of comparisons: one row for each training on a pool of samples, with its scores on the held-out instances; null until its evaluation is finished.';
comment on column v_arms.max_tokens is 'The budget in trained tokens, 0 where it is time; trained_tokens is what was really trained.';
comment on column v_arms.max_seconds is 'The budget in seconds of training, 0 where it is tokens; seconds is what was really spent.';
comment on column v_arms.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_arms.steps_to_success is 'Mean steps of the successful episodes, as in the table of `agentr compare`; null when there was none.';
comment on column v_arms.status is 'As in v_runs.';

create view v_promotions as
with promotion as (
    select i.run_id, r.recipe, r.started_at, i.iteration, i.checkpoint_out, r.config->>'$.evaluation.development' as development,
        case when (r.config->>'$.promote') = 'best' then i.promoted else i.checkpoint_out end as promoted
    from iteration i
    join run r using (run_id)
)
select p.run_id, p.recipe, p.iteration, p.checkpoint_out, p.promoted, made.iteration as promoted_iteration, c.path,
    p.development, m.value as success, m.n as episodes
from promotion p
join checkpoint c on c.checkpoint_id = p.promoted
join iteration made on made.run_id = p.run_id and made.checkpoint_out = p.promoted
left join evaluation e on e.iteration_id = made.iteration_id and e.name = p.development
left join metric m on m.scope = 'evaluation' and m.scope_id = e.evaluation_id and m.name = 'success'
order by p.started_at, p.run_id, p.iteration;
comment on view v_promotions is 'What goes on after each iteration: its own checkpoint, or with `promote: best` the best one so far.';
comment on column v_promotions.promoted_iteration is 'The iteration that made it; 0: the model that the run begins with.';
comment on column v_promotions.success is 'Of the promoted checkpoint on the development set; null where the recipe has none.';

create view v_ancestors as
with recursive line as (
    select checkpoint_id, parent_id as ancestor_id, 1 as generation from checkpoint where parent_id is not null
    union all
    select l.checkpoint_id, c.parent_id, l.generation + 1
    from line l
    join checkpoint c on c.checkpoint_id = l.ancestor_id
    where c.parent_id is not null
)
select l.checkpoint_id, l.generation, l.ancestor_id, r.run_id, r.recipe, r.method, i.iteration, c.path,
    c.config->>'$.outside.source' as outside_source, c.config->>'$.outside.files' as outside_files
from line l
join checkpoint c on c.checkpoint_id = l.ancestor_id
left join iteration i using (iteration_id)
left join run r using (run_id)
order by l.checkpoint_id, l.generation;
comment on view v_ancestors is 'From a checkpoint back through all trainings, those of other runs of the workspace included, to the first model.';
comment on column v_ancestors.outside_source is 'The folder from which `agentr import --as iteration` took weights that another program trained; null for our own.';
comment on column v_ancestors.outside_files is 'The hash of the weights and rollouts in that folder.';
comment on column v_ancestors.generation is '1: its parent.';
comment on column v_ancestors.run_id is 'The run that made the ancestor; null for the model that a run starts from.';

create view v_alarms as
select r.recipe, i.run_id, i.iteration, a.* exclude (iteration_id)
from alarm a
join iteration i using (iteration_id)
join run r using (run_id)
order by r.started_at, i.run_id, i.iteration, a.created_at, a.name;
comment on view v_alarms is 'The alarms of the runs: what was noticed, when, and what to do.';
