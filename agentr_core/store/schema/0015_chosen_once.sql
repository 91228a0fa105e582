-- What an iteration works on, chosen by its first stage and loaded by the later ones; one kind of id for pairs.

create table chosen_instance (
    iteration_id varchar not null,
    name varchar not null,
    position integer not null,
    instance_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, name, position)
);
comment on table chosen_instance is 'The instances that an iteration collects from, in their order, and under iteration 0 the held-out ones of its run.';
comment on column chosen_instance.name is 'train; of iteration 0: test, or the name of a set of `evaluation.sets`.';
comment on column chosen_instance.position is 'Counts from 0.';

create table planned_rollout (
    trajectory_id varchar primary key,
    iteration_id varchar not null,
    position integer not null,
    instance_id varchar not null,
    number integer not null,
    forced integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table planned_rollout is 'The episodes of an iteration''s exploration. One without a row in trajectory is not played yet, or failed for good.';
comment on column planned_rollout.position is 'Its place among the episodes of the iteration, from 0.';
comment on column planned_rollout.number is 'Its number among the episodes of its instance; 0 is greedy.';
comment on column planned_rollout.forced is 'How many of its first steps are the expert''s.';

alter table pair add column position integer;
update pair set position = numbered.position
from (select pair_id, row_number() over (partition by tree_id order by rowid) - 1 as position from pair) numbered
where pair.pair_id = numbered.pair_id;
comment on column pair.position is 'Its place among the pairs of its tree, from 0.';

-- Earlier versions wrote tree_id:good_leaf:bad_leaf.
update rejection set subject = pair.pair_id
from pair
where rejection.stage = 'splice' and rejection.subject = concat_ws(':', pair.tree_id, pair.good_leaf, pair.bad_leaf);
comment on column rejection.subject is 'Id or key of what was turned away; of stage splice, the pair_id or, of a good path, tree_id:leaf.';
