-- A part of a large store: trees `first_tree` to `last_tree` (excluded) of 100 steps each. Two steps in a row share a reply,
-- twenty share an observation; real ones repeat themselves more.
create or replace temp macro tree_id(t) as left(md5('tree' || t), 16);
create or replace temp macro reply_id(t, n) as left(md5('reply' || (t * 100 + n - n % 2)), 16);
create or replace temp macro observation_id(t, n) as left(md5('observation' || (t * 100 + n) // 20), 16);
create or replace temp table span as
    select unnest(range(getvariable('first_tree')::bigint, getvariable('last_tree')::bigint)) as t;
create or replace temp table steps as select t, n from span, range(1, 101) numbers(n);

insert into text (text_id, text)
select distinct reply_id(t, n), 'Thought: reply ' || (t * 100 + n - n % 2) || ' looks for its item in the list.' from steps
on conflict do nothing;

insert into text (text_id, text)
select distinct observation_id(t, n), 'Observation ' || (t * 100 + n) // 20 || ' of many.' from steps
on conflict do nothing;

insert into instance (instance_id, environment, split, instance_index)
select 'bench/train/' || t, 'bench', 'train', t from span;

insert into tree
    (tree_id, iteration_id, instance_id, checkpoint_id, seed, config, first_observation_id, dives_done, finished)
select tree_id(t), 'iteration', 'bench/train/' || t, 'policy', t, '{}', observation_id(t, 1), 8, true from span;

insert into node (tree_id, node_index, parent, depth, visits, value_sum, terminal, dive, duplicates)
select tree_id(t), 0, -1, 0, 8, 1.0, false, 0, 1 from span;

insert into node
    (tree_id, node_index, parent, depth, reply_id, action, observation_id, reward, terminated, success, disaster, visits,
    value_sum, terminal, dive, duplicates, draw)
select tree_id(t), n, greatest(0, n - 4), 1 + n // 4, reply_id(t, n), 'get ' || n % 7 || ' stick', observation_id(t, n), 0.0,
    false, false, false, 1, 0.0, false, n // 12, 1, n % 4
from steps;

insert into generation
    (kind, owner_id, position, draw, reply_id, token_ids, seed, finish_reason, prompt_tokens, completion_tokens)
select 'node', tree_id(t), n, n % 4, reply_id(t, n), [n, n + 1, n + 2, n + 3], n, 'stop', 200, 4 from steps;

drop table steps;
drop table span;
