-- The view of 0002 joined all nodes with their texts before it looked for those it wanted. Here every large table is read
-- once, and only what the samples of checkpoints point at is kept: `semi join` says so, which outer joins cannot.
create or replace view v_lineage as
with picked as materialized (
    select c.checkpoint_id, c.parent_id, c.weights_sha256, d.dataset_id, d.hash, w.position as dataset_position, s.sample_id, s.kind, s.cut,
        s.pair_id, s.instance_id, s.iteration_id, s.tree_id, v.position as verdict_position, v.verdict, v.reply_id as verdict_reply_id,
        coalesce(v.node_index, s.bad_leaf, s.good_leaf) as node_index
    from checkpoint c
    join dataset d using (dataset_id)
    join dataset_row w using (dataset_id)
    join sample s using (sample_id)
    left join verdict v on v.pair_id = s.pair_id
), nodes as materialized (
    select n.tree_id, n.node_index, n.depth, n.reply_id, n.action, n.observation_id, n.reward, n.draw
    from node n semi join picked p on (p.tree_id, p.node_index) = (n.tree_id, n.node_index)
), trees as materialized (
    select t.tree_id, t.seed, t.checkpoint_id, t.first_observation_id from tree t semi join picked p on p.tree_id = t.tree_id
), draws as (
    select g.owner_id, g.position, g.draw, g.seed
    from generation g semi join picked p on (p.tree_id, p.node_index) = (g.owner_id, g.position)
    where g.kind = 'node'
), texts as materialized (
    select x.text_id, x.text from text x semi join (
        select verdict_reply_id as text_id from picked
        union all select reply_id from nodes
        union all select observation_id from nodes
        union all select first_observation_id from trees
    ) wanted on wanted.text_id = x.text_id
)
select p.checkpoint_id, p.parent_id as parent_checkpoint_id, p.weights_sha256, p.dataset_id, p.hash as dataset_hash, p.dataset_position,
    p.sample_id, p.kind, p.cut, p.pair_id, k.first_error, p.verdict_position, p.verdict, j.text as verdict_reply,
    n.tree_id, n.node_index, n.depth as node_depth, a.text as reply, n.action, o.text as observation, n.reward as node_reward,
    p.instance_id, x.environment, x.split, x.instance_index, t.seed as tree_seed, g.seed as generation_seed,
    t.checkpoint_id as policy_checkpoint_id, i.iteration, r.run_id, r.recipe, r.config
from picked p
left join critique k using (pair_id)
left join trees t on t.tree_id = p.tree_id
left join nodes n on n.tree_id = p.tree_id and n.node_index = p.node_index
left join draws g on g.owner_id = n.tree_id and g.position = n.node_index and g.draw = n.draw
left join texts j on j.text_id = p.verdict_reply_id
left join texts a on a.text_id = n.reply_id
left join texts o on o.text_id = case when n.node_index is not null then coalesce(n.observation_id, t.first_observation_id) end
left join instance x on x.instance_id = p.instance_id
left join iteration i on i.iteration_id = p.iteration_id
left join run r on r.run_id = i.run_id;
comment on view v_lineage is 'From a checkpoint back to the tree nodes, seeds and resolved recipe behind it: one row for each dataset row and verdict, or for each dataset row that has no verdict.';
comment on column v_lineage.node_index is 'The judged node; without verdicts the leaf of the bad path, else of the good one.';
comment on column v_lineage.config is 'The resolved recipe of the run that made the sample.';
