-- Groups whose episodes go on from the beginning of a failed one.

alter table rl_group add column prefix integer default 0;

alter table rl_step add column recovered double;
comment on column rl_step.reward is 'Mean reward of the episodes of the step.';
comment on column rl_step.episode_tokens is 'Mean sampled tokens of an episode, those that it was given not counted.';

comment on column derivation.operator is 'What the method calls the way: operators of a flywheel; branch: leaves an episode of its group; revision: goes on from a failed episode.';
