-- A checkpoint trained on `samples` revision samples, each of a tree of its own, spread over the `trees` trees.
create or replace temp table picked as
    select r, r * (getvariable('trees') // getvariable('samples')) as t
    from (select unnest(range(getvariable('samples')::bigint)) as r);

insert into run (run_id, recipe, method, config, versions, workspace, status, started_at)
values ('run', 'bench', 'agent-r', '{}', '{}', '.', 'finished', timestamp '2026-01-01');

insert into iteration (iteration_id, run_id, iteration, status) values ('iteration', 'run', 1, 'finished');

insert into dataset (dataset_id, iteration_id, hash, counts) values ('dataset', 'iteration', 'hash', '{}');

insert into checkpoint (checkpoint_id, parent_id, dataset_id, iteration_id, path, weights_sha256, config)
values
    ('policy', null, null, null, '.', 'policy', '{}'),
    ('trained', 'policy', 'dataset', 'iteration', '.', 'trained', '{}');

insert into pair (pair_id, iteration_id, tree_id, good_leaf, bad_leaf, shared_steps, good_reward, bad_reward, gap)
select 'pair' || r, 'iteration', tree_id(t), 97, 98, 1, 1.0, 0.0, 1.0 from picked;

insert into critique (pair_id, iteration_id, first_error, verdicts, nodes)
select 'pair' || r, 'iteration', 4, [{'position': p, 'verdict': 'good', 'reply': reply(t, 1 + 4 * p)} for p in range(5)],
    [1 + 4 * p for p in range(5)]
from picked;

insert into sample (sample_id, iteration_id, kind, instance_id, pair_id, tree_id, messages, provenance)
select 'sample' || r, 'iteration', 'revision', 'bench/train/' || t, 'pair' || r, tree_id(t), [],
    {
        'tree_id': tree_id(t), 'good_leaf': 97, 'bad_leaf': 98, 'split': null, 'cut': 5, 'good_reward': null, 'bad_reward': null,
        'extra': '{}'
    }
from picked;

insert into dataset_row (dataset_id, position, sample_id) select 'dataset', r, 'sample' || r from picked;

drop table picked;
