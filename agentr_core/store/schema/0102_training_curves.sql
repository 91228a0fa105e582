-- The curves by which fine-tuning is watched.

alter table training_step add column learning_rate double;
alter table training_step add column grad_norm double;
comment on column training_step.learning_rate is 'Null for steps that an earlier version stored.';
comment on column training_step.grad_norm is 'Norm of the gradient before it is clipped; null where nothing was trained, and for steps that an earlier version stored.';
