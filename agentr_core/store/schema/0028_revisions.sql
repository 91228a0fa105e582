-- Groups whose episodes go on from the beginning of a failed one.

alter table rl_group add column prefix integer default 0;
comment on column rl_group.prefix is 'Steps that its episodes were given, the beginning of a failed one, which derivation names; they are not trained. 0: they begin at the start.';

alter table rl_step add column recovered double;
comment on column rl_step.recovered is 'Share of the episodes that went on from a failed one and succeeded; null where none did. The shares and means beside it are of the others.';
comment on column rl_step.reward is 'Mean reward of the episodes of the step.';
comment on column rl_step.episode_tokens is 'Mean sampled tokens of an episode, those that it was given not counted.';

comment on column derivation.operator is 'What the method calls the way: operators of a flywheel; branch: leaves an episode of its group; revision: goes on from a failed episode.';

drop view v_rl_steps;
create view v_rl_steps as
select r.recipe as recipe, i.run_id, i.iteration, s.* exclude (iteration_id, created_at),
    s.sampled_tokens / nullif(s.sampling_seconds, 0) as tokens_per_second
from rl_step s
join iteration i using (iteration_id)
join run r using (run_id)
order by r.started_at, i.run_id, i.iteration, s.step;
comment on view v_rl_steps is 'How reinforcement learning went, step by step.';

drop view v_groups;
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
comment on column v_groups.contrast is 'Whether the group was trained on: what its episodes are worth differs.';
comment on column v_groups.steps is 'Mean steps of its episodes, those that they were given counted.';
