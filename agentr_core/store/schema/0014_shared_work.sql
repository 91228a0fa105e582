-- Runs that ask a model for the same take over what another one has of it.

create table stage_input (
    run_id varchar not null,
    stage varchar not null,
    input_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (run_id, stage)
);
comment on table stage_input is 'What decides the replies of a stage, as one hash for each run; those of earlier versions have none.';
comment on column stage_input.input_id is 'Hash of all that the replies depend on, beside checkpoint, iteration and instance: runs with equal ones take over trees, judgements and rollouts of each other.';

alter table tree add column copied_from varchar;
comment on column tree.copied_from is 'The tree that this one is a copy of, as another run with the same `stage_input` first grew it; null for a tree that was grown here. Its judgements are copies, too, where the judge was the same.';
alter table trajectory add column copied_from varchar;
comment on column trajectory.copied_from is 'As tree.copied_from, for rollouts.';
alter table judgement add column copied_from varchar;
comment on column judgement.copied_from is 'The tree on which the judgement was first made, if not on this one.';

alter view v_orphans rename to v_orphans_0004;
comment on view v_orphans_0004 is 'Dangling references of the tables of the first four migrations; v_orphans has them too.';
create view v_orphans as
from v_orphans_0004
union all select 'stage_input', 'run_id', run_id from stage_input anti join run using (run_id)
union all select 'tree', 'copied_from', t.copied_from from tree t anti join tree o on o.tree_id = t.copied_from where t.copied_from is not null
union all select 'judgement', 'copied_from', j.copied_from from judgement j anti join tree o on o.tree_id = j.copied_from where j.copied_from is not null
union all select 'trajectory', 'copied_from', t.copied_from from trajectory t anti join trajectory o on o.trajectory_id = t.copied_from where t.copied_from is not null;
comment on view v_orphans is 'Dangling references; a sound store has none.';
