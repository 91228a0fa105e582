-- Which model collects, where it is another one than the policy (`models.teacher`).

alter table iteration add column collected_by varchar;
comment on column iteration.collected_by is 'The checkpoint that plays the training instances, where it is not the policy: the teacher.';
comment on column iteration.checkpoint_in is 'The policy: what the iteration before promoted. It collects, unless collected_by names another.';

alter view v_orphans rename to v_orphans_0024;
comment on view v_orphans_0024 is 'Dangling references of the tables of the first 24 migrations; v_orphans has them too.';
create view v_orphans as
from v_orphans_0024
union all select 'iteration', 'collected_by', collected_by from iteration i anti join checkpoint c on c.checkpoint_id = i.collected_by where collected_by is not null;
comment on view v_orphans is 'Dangling references; a sound store has none.';
