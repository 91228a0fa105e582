-- Steps to success beside the mean of all steps, and what comments of earlier migrations said too little or wrongly.

create or replace view v_evaluations as
with counted as (
    select e.evaluation_id, count(*) as n, avg(t.success::int) as p, avg(t.reward) as reward, avg(t.num_steps) as steps,
        avg(t.num_steps) filter (t.success) as steps_to_success
    from episode e join trajectory t using (trajectory_id)
    group by e.evaluation_id
), bounds as (
    -- Wilson's interval at 95%: z = 1.959964
    select *, (p + 1.9207294 / n) / (1 + 3.8414588 / n) as centre,
        1.959964 * sqrt(p * (1 - p) / n + 0.9603647 / (n * n)) / (1 + 3.8414588 / n) as half
    from counted
)
select r.run_id, r.recipe, i.iteration, e.name as evaluation, e.split, e.evaluation_id, e.checkpoint_id, e.finished,
    b.p as success, greatest(0, b.centre - b.half) as success_low, least(1, b.centre + b.half) as success_high,
    b.reward, b.steps, b.steps_to_success, coalesce(b.n, 0) as episodes
from evaluation e
join iteration i using (iteration_id)
join run r using (run_id)
left join bounds b using (evaluation_id)
order by r.started_at, r.run_id, i.iteration, e.name, e.split;
comment on view v_evaluations is 'Success share with its 95% Wilson interval and mean reward of every evaluation.';
comment on column v_evaluations.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_evaluations.steps_to_success is 'Mean steps of the successful episodes; null when there was none.';

create or replace view v_iterations as
select v.run_id, v.recipe, v.iteration, v.evaluation, v.split, v.checkpoint_id,
    v.success, v.success_low, v.success_high, v.reward, v.steps, v.steps_to_success, v.episodes,
    x.success as revision_success, x.success_low as revision_success_low, x.success_high as revision_success_high,
    x.reward as revision_reward, coalesce(x.episodes, 0) as revision_episodes
from v_evaluations v
left join v_evaluations x
    on x.evaluation = 'revision_test' and (x.run_id, x.iteration, x.split, x.checkpoint_id) = (v.run_id, v.iteration, v.split, v.checkpoint_id)
where v.evaluation <> 'revision_test'
order by v.run_id, v.iteration, v.split;
comment on view v_iterations is 'How good the policy is after each iteration (0: the model the run starts from), one row for each split; revision_ columns: recovery from failed prefixes.';
comment on column v_iterations.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_iterations.steps_to_success is 'Mean steps of the successful episodes; null when there was none.';

create or replace view v_arms as
with trained as (
    select scope_id as iteration_id, value::bigint as trained_tokens from metric where scope = 'iteration' and name = 'trained_tokens'
), spent as (
    select checkpoint_id, max(seconds) as seconds from training_step group by checkpoint_id
)
select p.run_id as comparison_id, p.recipe as comparison, substr(r.recipe, length(p.recipe) + 2) as arm, (r.config->>'$.seed')::bigint as seed,
    (r.config->>'$.training.max_tokens')::bigint as max_tokens,
    coalesce((r.config->>'$.training.max_seconds')::double, 0) as max_seconds, (r.config->>'$.data.use') as trains_on, r.run_id, r.status,
    d.dataset_id, d.hash as dataset_hash, i.checkpoint_out as checkpoint_id, t.trained_tokens, e.seconds,
    v.success, v.reward, v.steps, v.steps_to_success, v.episodes, v.revision_success, v.revision_episodes
from run r
join run p on p.run_id = (r.config->>'$.compare.pool')
left join iteration i on i.run_id = r.run_id and i.iteration = 1
left join dataset d on d.iteration_id = i.iteration_id
left join trained t on t.iteration_id = i.iteration_id
left join spent e on e.checkpoint_id = i.checkpoint_out
left join v_iterations v on v.run_id = r.run_id and v.iteration = 1
order by p.run_id, list_position(json_keys(p.config, '$.compare.arms'), substr(r.recipe, length(p.recipe) + 2)), arm, max_tokens, max_seconds, seed;
comment on view v_arms is 'The arms of comparisons: one row for each training on a pool of samples, with its scores on the held-out instances.';
comment on column v_arms.max_tokens is 'The budget in trained tokens, 0 where it is time; trained_tokens is what was really trained.';
comment on column v_arms.max_seconds is 'The budget in seconds of training, 0 where it is tokens; seconds is what was really spent.';
comment on column v_arms.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_arms.steps_to_success is 'Mean steps of the successful episodes, as in the table of `agentr compare`; null when there was none.';

comment on column sample.kind is 'revision, good, general or expert; chosen or rejected for a side of a preference pair; judge is stored by nothing so far.';
comment on column sample.trajectory_id is 'The stored episode behind the sample: a path of a tree, an episode of the expert or of the policy; null where there is none, as for splices of all modes but `continued`.';
comment on column trajectory.source is 'tree: a path of a tree; rollout: played by the policy alone, from the beginning or from a turn of revision; episode: of an evaluation; expert. Nothing writes splice.';
comment on column v_funnel.spliced is 'Splices made: revision samples and, in splice.mode verified, splices that failed when they were played.';
comment on column v_funnel.verified is 'Revision samples of splice.mode verified, whose splice was played live and cleared the threshold; 0 in the other modes, although in mode continued all revision samples are episodes that cleared it.';
