-- Several evaluation sets in one run, and instances that are variants of one another.

alter table instance add column origin_id varchar;
comment on column instance.origin_id is 'The instance that this one is a variant of (renamed, say); null where it is one of its own. Intervals are clustered by it.';
comment on column evaluation.name is 'test: the held-out instances of `instances.test`; revision_test starts from failed prefixes; other names are the sets of `evaluation.sets`.';
comment on column trajectory.stop is 'success, failure, disaster, step_limit, context_limit, or repeats: the same reply in the same state too often (`evaluation.repeats`).';

create table revision_state (
    run_id varchar not null,
    position integer not null,
    trajectory_id varchar not null,
    repeat integer not null,
    cut integer not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (run_id, position)
);
comment on table revision_state is 'The states from which the revision test of a run goes on: chosen once, from failed episodes of its first model, for every model that is tested.';
comment on column revision_state.run_id is 'The run; in a comparison that of the pool.';
comment on column revision_state.repeat is 'Number of the failed episode among those of its instance.';
comment on column revision_state.cut is 'Steps of the failed episode that are replayed.';

create or replace view v_iterations as
select v.run_id, v.recipe, v.iteration, v.evaluation, v.split, v.checkpoint_id,
    v.success, v.success_low, v.success_high, v.reward, v.steps, v.steps_to_success, v.episodes,
    x.success as revision_success, x.success_low as revision_success_low, x.success_high as revision_success_high,
    x.reward as revision_reward, coalesce(x.episodes, 0) as revision_episodes
from v_evaluations v
left join v_evaluations x
    on x.evaluation = 'revision_test' and v.evaluation = 'test' and (x.run_id, x.iteration, x.split, x.checkpoint_id) = (v.run_id, v.iteration, v.split, v.checkpoint_id)
where v.evaluation <> 'revision_test'
order by v.run_id, v.iteration, v.evaluation <> 'test', v.evaluation;
comment on view v_iterations is 'How good the policy is after each iteration (0: the model the run starts from), one row for each evaluation set; revision_ columns, in the rows of set test: recovery from failed prefixes.';
comment on column v_iterations.success_low is 'Of the 95% Wilson interval over episodes. Those of reports are clustered by instance, or by the instance that several are variants of.';
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
left join v_iterations v on v.run_id = r.run_id and v.iteration = 1 and v.evaluation = 'test'
order by p.run_id, list_position(json_keys(p.config, '$.compare.arms'), substr(r.recipe, length(p.recipe) + 2)), arm, max_tokens, max_seconds, seed;
comment on view v_arms is 'The arms of comparisons: one row for each training on a pool of samples, with its scores on the held-out instances.';
comment on column v_arms.max_tokens is 'The budget in trained tokens, 0 where it is time; trained_tokens is what was really trained.';
comment on column v_arms.max_seconds is 'The budget in seconds of training, 0 where it is tokens; seconds is what was really spent.';
comment on column v_arms.steps is 'Mean steps of all episodes, failed ones included.';
comment on column v_arms.steps_to_success is 'Mean steps of the successful episodes, as in the table of `agentr compare`; null when there was none.';
