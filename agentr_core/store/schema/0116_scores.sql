-- What a scorer says of the tokens that group RL samples (`grpo.distil`).

create table rl_score (
    trajectory_id varchar not null,
    position integer not null,
    logprobs double[] not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (trajectory_id, position)
);
comment on table rl_score is 'A scorer''s log-probabilities of the tokens of a step of a rollout (`grpo.distil`). Those of a step of training are all stored at once; a reply that it could not read has none.';
comment on column rl_score.position is 'That of the step.';
comment on column rl_score.logprobs is 'Natural logarithms, one for each token of the reply that is trained, in their order, after what the scorer was told.';

alter table rl_step add column scorer_kl double;
comment on column rl_step.scorer_kl is 'Mean of what the log-probability of a sampled token is above the scorer''s, in nats: an estimate of the divergence of the policy from it; null without a scorer.';
comment on column rl_group.contrast is 'Whether what its episodes are worth differs, or with credit for steps any of them has an advantage, or a scorer gives the tokens one; only such groups are trained on.';
