-- Preference pairs, and the steps of trainings.

create table preference (
    preference_id varchar primary key,
    iteration_id varchar not null,
    kind varchar not null,
    instance_id varchar,
    chosen_sample_id varchar not null,
    rejected_sample_id varchar not null,
    chosen_reward double,
    rejected_reward double,
    margin double,
    dropped_steps integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table preference is 'Two samples that go on from the same conversation, one better than the other. v_preferences leads to their trajectories.';
comment on column preference.kind is 'lose, win, step, own, tree or file: what made one side better.';
comment on column preference.chosen_reward is 'Final reward of the trajectory behind the chosen side; null where a file does not tell.';
comment on column preference.margin is 'chosen_reward - rejected_reward.';
comment on column preference.dropped_steps is 'Steps cut off the end of the rejected side.';

create table training_step (
    checkpoint_id varchar not null,
    step integer not null,
    loss double not null,
    trained_tokens bigint not null,
    seconds double not null,
    chosen_logps double,
    rejected_logps double,
    chosen_rewards double,
    rejected_rewards double,
    reward_accuracy double,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (checkpoint_id, step)
);
comment on table training_step is 'One optimizer step of the training of a checkpoint.';
comment on column training_step.trained_tokens is 'Tokens that carried loss up to here.';
comment on column training_step.seconds is 'Time spent in training up to here.';
comment on column training_step.chosen_logps is 'Preference training: mean log-probability of the chosen sides of the step, summed over their replies.';
comment on column training_step.chosen_rewards is 'Preference training: beta times the log-ratio of policy and reference, mean over the chosen sides.';
comment on column training_step.reward_accuracy is 'Preference training: share of pairs of the step whose chosen side has the higher implicit reward.';

create view v_preferences as
select i.run_id, i.iteration, p.preference_id, p.kind, p.instance_id, p.chosen_reward, p.rejected_reward, p.margin, p.dropped_steps,
    p.chosen_sample_id, p.rejected_sample_id, c.trajectory_id as chosen_trajectory_id, r.trajectory_id as rejected_trajectory_id,
    coalesce(c.tree_id, r.tree_id) as tree_id, c.good_leaf, r.bad_leaf, c.shared_steps,
    exists (from dataset_row d where d.sample_id = p.rejected_sample_id) as used
from preference p
join iteration i using (iteration_id)
left join sample c on c.sample_id = p.chosen_sample_id
left join sample r on r.sample_id = p.rejected_sample_id
order by i.run_id, i.iteration, p.preference_id;
comment on view v_preferences is 'Preference pairs with the trajectories, or the tree and its leaves, that they are made of.';
comment on column v_preferences.used is 'Whether a dataset has the pair.';

alter view v_orphans rename to v_orphans_0002;
comment on view v_orphans_0002 is 'Dangling references of the tables of the first two migrations; v_orphans has them too.';
create view v_orphans as
from v_orphans_0002
union all select 'preference', 'iteration_id', iteration_id from preference anti join iteration using (iteration_id)
union all select 'preference', 'instance_id', instance_id from preference anti join instance using (instance_id) where instance_id is not null
union all select 'preference', 'chosen_sample_id', chosen_sample_id from preference p anti join sample s on s.sample_id = p.chosen_sample_id
union all select 'preference', 'rejected_sample_id', rejected_sample_id from preference p anti join sample s on s.sample_id = p.rejected_sample_id
union all select 'training_step', 'checkpoint_id', checkpoint_id from training_step anti join checkpoint using (checkpoint_id);
comment on view v_orphans is 'Dangling references; a sound store has none.';
