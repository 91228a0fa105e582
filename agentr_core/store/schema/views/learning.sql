-- Training: what was chosen, played and learned.

create view v_selection as
select r.recipe, i.run_id, i.iteration, s.* exclude (iteration_id, created_at)
from selection s
join iteration i using (iteration_id)
join run r using (run_id)
order by r.started_at, i.run_id, i.iteration, s.selected desc, s.front, s.crowding desc, s.instance_id;
comment on view v_selection is 'What each stage of the curriculum chose to train on, and why.';

create view v_groups as
with spread as (
    select o.iteration_id, o.step, o.number, stddev_pop(t.reward) as reward_deviation, min(o.advantage) as advantage_low,
        max(o.advantage) as advantage_high, avg(t.num_steps) as steps
    from rl_rollout o join trajectory t using (trajectory_id)
    group by all
)
select r.recipe, i.run_id, i.iteration, g.step, g.number, g.instance_id, x.depth, g.prefix, g.policy, g.draw, g.episodes, g.wins,
    g.reward, s.reward_deviation, s.advantage_low, s.advantage_high, s.steps, g.contrast
from rl_group g
join iteration i on i.iteration_id = g.iteration_id
join run r using (run_id)
left join instance x on x.instance_id = g.instance_id
left join spread s on (s.iteration_id, s.step, s.number) = (g.iteration_id, g.step, g.number)
order by r.started_at, i.run_id, i.iteration, g.step, g.number;
comment on view v_groups is 'Groups of reinforcement learning: the episodes of one instance in one step, how they ended and what they taught.';
comment on column v_groups.contrast is 'Whether the group was trained on: what its episodes are worth differs, or a scorer tells the worth of their tokens.';
comment on column v_groups.steps is 'Mean steps of its episodes, those that they were given counted.';

create view v_trainings as
with taken as (
    select i.iteration_id, t.step, t.loss, t.learning_rate, t.trained_tokens
    from training_step t join iteration i on i.checkpoint_out = t.checkpoint_id and i.iteration > 0
    where i.iteration_id not in (select iteration_id from rl_step)
    union all
    select iteration_id, step, loss, learning_rate, sum(trained_tokens) over (partition by iteration_id order by step) from rl_step
)
select r.recipe, r.method, i.run_id, i.iteration, c.path as model, i.checkpoint_out as checkpoint_id, count(*) as steps,
    max(t.learning_rate) as learning_rate, arg_min(t.loss, t.step) as first_loss, arg_max(t.loss, t.step) as last_loss,
    max(t.trained_tokens)::bigint as trained_tokens
from taken t
join iteration i using (iteration_id)
join run r using (run_id)
left join checkpoint c on c.checkpoint_id = i.checkpoint_out
group by r.started_at, r.recipe, r.method, i.run_id, i.iteration, c.path, i.checkpoint_out
order by r.started_at, i.run_id, i.iteration;
comment on view v_trainings is 'The trainings of the runs, group RL among them: learning rate, loss at both ends, tokens; v_training_steps and v_rl_steps have each step.';
comment on column v_trainings.model is 'Directory of what was trained; null while it is.';
comment on column v_trainings.learning_rate is 'The highest one, which a schedule rises to and falls from; null where only an earlier version knew it.';

create view v_training_steps as
select r.recipe as recipe, i.run_id, i.iteration, t.* exclude (created_at)
from training_step t
join iteration i on i.checkpoint_out = t.checkpoint_id and i.iteration > 0
join run r using (run_id)
order by r.started_at, i.run_id, i.iteration, t.step;
comment on view v_training_steps is 'How each training of a run went, step by step: loss, learning rate, gradient norm; of preference training also its measures.';

create view v_rl_steps as
select r.recipe as recipe, i.run_id, i.iteration, s.* exclude (iteration_id, created_at),
    s.sampled_tokens / nullif(s.sampling_seconds, 0) as tokens_per_second
from rl_step s
join iteration i using (iteration_id)
join run r using (run_id)
order by r.started_at, i.run_id, i.iteration, s.step;
comment on view v_rl_steps is 'How reinforcement learning went, step by step.';

create view v_rl_validations as
select r.recipe as recipe, i.run_id, i.iteration, v.step, count(*) as episodes, avg(t.success::integer) as success, avg(t.reward) as reward
from rl_validation v
join trajectory t using (trajectory_id)
join iteration i on i.iteration_id = v.iteration_id
join run r using (run_id)
group by r.started_at, r.recipe, i.run_id, i.iteration, v.step
order by r.started_at, i.run_id, i.iteration, v.step;
comment on view v_rl_validations is 'How the policy did on the development set between the steps of reinforcement learning.';
