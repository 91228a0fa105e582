-- Paths of search trees that were scored again. A path has a row of `trajectory` only where it became a sample.

create table leaf_regrade (
    scoring_id varchar not null,
    tree_id varchar not null,
    leaf bigint not null,
    old_reward double not null,
    old_success boolean not null,
    reward double,
    success boolean,
    answer struct("role" varchar, model varchar, prompt_hash varchar, seed bigint, "text" varchar, finish_reason varchar, prompt_tokens bigint, completion_tokens bigint, thinks boolean),
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (scoring_id, tree_id, leaf)
);
comment on table leaf_regrade is 'The reward that a scoring gives a path of a tree, from its root to a leaf. v_regrades has the old one beside it.';
comment on column leaf_regrade.tree_id is 'The tree; of one that was copied from another run, the original.';
comment on column leaf_regrade.leaf is 'node.node_index of the last step of the path.';
comment on column leaf_regrade.old_reward is 'As in its node, whose table is much larger: lists of paths need not read it.';
comment on column leaf_regrade.old_success is 'As old_reward.';
comment on column leaf_regrade.reward is 'Null where the reply of the model that was asked could not be read.';
comment on column leaf_regrade.success is 'Null where reward is.';
comment on column leaf_regrade.answer is 'The whole reply of the model that was asked; null where a rule decided.';
