-- Which model collects, where it is another one than the policy (`models.teacher`).

alter table iteration add column collected_by varchar;
comment on column iteration.collected_by is 'The checkpoint that plays the training instances, where it is not the policy: the teacher.';
comment on column iteration.checkpoint_in is 'The policy: what the iteration before promoted. It collects, unless collected_by names another.';
