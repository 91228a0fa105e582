-- Reinforcement learning on groups: each step, its groups, and the rollouts of each with their advantages. A rollout is a
-- trajectory; the log-probabilities with which its tokens were sampled are in generation.

create table rl_step (
    iteration_id varchar not null,
    step integer not null,
    reward double not null,
    pass_at_1 double not null,
    pass_at_n double not null,
    mixed_share double not null,
    drawn_again integer not null,
    episode_tokens double not null,
    episode_steps double not null,
    cut_share double not null,
    loss double,
    entropy double,
    kl double,
    sampler_kl double,
    clip_share double,
    grad_norm double,
    learning_rate double not null,
    sampled_tokens bigint not null,
    trained_tokens bigint not null,
    sampling_seconds double,
    training_seconds double not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, step)
);
comment on table rl_step is 'One step of reinforcement learning: groups are sampled, and those with contrast are trained on.';
comment on column rl_step.step is 'From 1.';
comment on column rl_step.pass_at_1 is 'Share of successful episodes.';
comment on column rl_step.pass_at_n is 'Share of groups with a successful episode.';
comment on column rl_step.mixed_share is 'Share of groups with contrast, of those that were drawn.';
comment on column rl_step.drawn_again is 'Groups drawn in place of such without contrast.';
comment on column rl_step.cut_share is 'Share of replies that their token limit cut.';
comment on column rl_step.loss is 'Mean over the updates; null, as what follows, where no group had contrast.';
comment on column rl_step.entropy is 'Mean entropy of the policy at a trained token, in nats.';
comment on column rl_step.kl is 'Mean divergence from the model that the iteration starts from, in nats a token; null where the loss has none.';
comment on column rl_step.sampler_kl is 'Mean divergence from the policy that sampled, in nats a token.';
comment on column rl_step.clip_share is 'Share of trained tokens whose ratio was clipped.';
comment on column rl_step.sampling_seconds is 'Null where its episodes were in the store already.';
comment on column rl_step.grad_norm is 'Mean norm of the gradient before it is clipped.';

create table rl_group (
    iteration_id varchar not null,
    step integer not null,
    number integer not null,
    instance_id varchar not null,
    policy varchar not null,
    draw integer not null,
    episodes integer not null,
    reward double not null,
    wins integer not null,
    contrast boolean not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, step, number)
);
comment on table rl_group is 'The episodes of one instance in a step of reinforcement learning.';
comment on column rl_group.policy is 'The policy that sampled: the checkpoint in the making and the steps that it had been trained.';
comment on column rl_group.draw is 'Times that groups without contrast had been drawn again when this one was drawn.';
comment on column rl_group.reward is 'Mean reward.';

create table rl_rollout (
    trajectory_id varchar primary key,
    iteration_id varchar not null,
    step integer not null,
    number integer not null,
    episode integer not null,
    advantage double not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table rl_rollout is 'An episode of a group, and its advantage over the others.';
comment on column rl_rollout.number is 'That of its group.';
