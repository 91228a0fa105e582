-- Steps of a training that another program did, of which some measures are not known.

alter table rl_step alter column cut_share drop not null;
alter table rl_step alter column learning_rate drop not null;
alter table rl_step alter column training_seconds drop not null;
comment on column rl_step.cut_share is 'Share of replies that their token limit cut; null in an iteration that another program trained.';
comment on column rl_step.learning_rate is 'Null in an iteration that another program trained.';
comment on column rl_step.training_seconds is 'Null in an iteration that another program trained.';
