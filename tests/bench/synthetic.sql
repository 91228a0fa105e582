-- A part of a large store: trees `first_tree` to `last_tree` (excluded) of 100 steps each. Two steps in a row share a reply,
-- twenty share an observation; real ones repeat themselves more.
create or replace temp macro tree_id(t) as left(md5('tree' || t), 16);
create or replace temp macro reply(t, n) as 'Thought: reply ' || (t * 100 + n - n % 2) || ' looks for its item in the list.';
create or replace temp macro observation(t, n) as 'Observation ' || (t * 100 + n) // 20 || ' of many.';
create or replace temp table span as
    select unnest(range(getvariable('first_tree')::bigint, getvariable('last_tree')::bigint)) as t;
create or replace temp table steps as select t, n from span, range(101) numbers(n);

insert into instance (instance_id, environment, split, instance_index)
select 'bench/train/' || t, 'bench', 'train', t from span;

insert into tree
    (tree_id, iteration_id, instance_id, instance, checkpoint_id, seed, config, first_observation, dives_done, finished)
select tree_id(t), 'iteration', 'bench/train/' || t, {'environment': 'bench', 'split': 'train', 'index': t}, 'policy', t, '{}',
    observation(t, 1), 8, true
from span;

-- As a collection stores them: 64 trees grow side by side.
insert into node (tree_id, node_index, parent, depth, visits, value_sum, terminal, dive, duplicates, merged, step, asked)
select tree_id(t), n, if(n = 0, -1, greatest(0, n - 4)), if(n = 0, 0, 1 + n // 4), if(n = 0, 8, 1), if(n = 0, 1.0, 0.0),
    false, n // 12, 1, [],
    if(n > 0, {
        'reply': reply(t, n), 'action': 'get ' || n % 7 || ' stick', 'observation': observation(t, n), 'reward': 0.0,
        'matched': null, 'valid': null, 'terminated': false, 'success': false, 'disaster': false,
        'token_ids': [n, n + 1, n + 2, n + 3], 'logprobs': null, 'finish_reason': 'stop', 'tokenizer': null, 'dropped': 0,
        'tool_calls': [], 'answers': []
    }, null),
    if(n > 0, {'seed': n, 'number': n % 4, 'prompt_tokens': 200, 'completion_tokens': 4, 'thinks': false}, null)
from steps
order by t // 64, n, t;

drop table steps;
drop table span;
