-- Several evaluation sets in one run, and instances that are variants of one another.

alter table instance add column origin_id varchar;
comment on column instance.origin_id is 'The instance that this one is a variant of (renamed, say); null where it is one of its own. Intervals are clustered by it.';
comment on column evaluation.name is 'test: the held-out instances of `instances.test`; revision_test starts from failed prefixes; other names are the sets of `evaluation.sets`.';

create table revision_state (
    run_id varchar not null,
    position integer not null,
    trajectory_id varchar not null,
    repeat integer not null,
    cut integer not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (run_id, position)
);
comment on table revision_state is 'The states from which the revision test of a run goes on: chosen once, from failed episodes of its first model, for every model that is tested.';
comment on column revision_state.run_id is 'The run; in a comparison that of the pool.';
comment on column revision_state.repeat is 'Number of the failed episode among those of its instance.';
comment on column revision_state.cut is 'Steps of the failed episode that are replayed.';
