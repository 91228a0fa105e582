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
comment on column run.status is 'What was recorded last: running, finished or failed; evaluating: there is only an evaluation of its model, which is not done; collecting: there is only what was gathered for its first iteration. A killed process records nothing more: v_runs tells.';

create or replace view v_arms as
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
comment on view v_arms is 'The arms of comparisons: one row for each training on a pool of samples, with its scores on the held-out instances.';
comment on column v_arms.max_tokens is 'The budget in trained tokens, 0 where it is time; trained_tokens is what was really trained.';
comment on column v_arms.max_seconds is 'The budget in seconds of training, 0 where it is tokens; seconds is what was really spent.';
comment on column v_arms.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_arms.steps_to_success is 'Mean steps of the successful episodes, as in the table of `agentr compare`; null when there was none.';
comment on column v_arms.status is 'As in v_runs.';
