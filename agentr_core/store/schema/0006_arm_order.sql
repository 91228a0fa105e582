-- Arms in the order of their recipe, with a budget of tokens or of time.

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
    v.success, v.reward, v.steps, v.episodes, v.revision_success, v.revision_episodes
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
