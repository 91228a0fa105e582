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
