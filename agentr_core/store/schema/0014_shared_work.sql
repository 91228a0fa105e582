-- Runs that ask a model for the same take over what another one has of it.

create table stage_input (
    run_id varchar not null,
    stage varchar not null,
    input_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (run_id, stage)
);
comment on column stage_input.input_id is 'Hash of all that the replies depend on, beside checkpoint, iteration and instance: runs with equal ones take over trees, judgements and rollouts of each other.';

alter table tree add column copied_from varchar;
comment on column tree.copied_from is 'The tree that this one is a copy of, as another run with the same `stage_input` first grew it; null for a tree that was grown here. Its judgements are copies, too, where the judge was the same.';
alter table trajectory add column copied_from varchar;
alter table judgement add column copied_from varchar;
comment on column judgement.copied_from is 'The tree on which the judgement was first made, if not on this one.';
