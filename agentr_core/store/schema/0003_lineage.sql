-- Only what a sample points at is looked up. The view of 0002 joined all nodes with their texts first.
create or replace view v_lineage as
select c.checkpoint_id, c.parent_id as parent_checkpoint_id, c.weights_sha256, d.dataset_id, d.hash as dataset_hash, w.position as dataset_position,
    s.sample_id, s.kind, s.cut, s.pair_id, k.first_error, v.position as verdict_position, v.verdict, j.text as verdict_reply,
    n.tree_id, n.node_index, n.depth as node_depth, a.text as reply, n.action, o.text as observation, n.reward as node_reward,
    s.instance_id, x.environment, x.split, x.instance_index, t.seed as tree_seed, g.seed as generation_seed,
    t.checkpoint_id as policy_checkpoint_id, i.iteration, r.run_id, r.recipe, r.config
from checkpoint c
join dataset d using (dataset_id)
join dataset_row w using (dataset_id)
join sample s using (sample_id)
left join critique k using (pair_id)
left join verdict v on v.pair_id = s.pair_id
left join text j on j.text_id = v.reply_id
left join tree t on t.tree_id = s.tree_id
left join node n on n.tree_id = s.tree_id and n.node_index = coalesce(v.node_index, s.bad_leaf, s.good_leaf)
left join text a on a.text_id = n.reply_id
left join text o on o.text_id = case when n.node_index is not null then coalesce(n.observation_id, t.first_observation_id) end
left join generation g on g.kind = 'node' and g.owner_id = n.tree_id and g.position = n.node_index and g.draw = n.draw
left join instance x on x.instance_id = s.instance_id
left join iteration i on i.iteration_id = s.iteration_id
left join run r on r.run_id = i.run_id;
comment on view v_lineage is 'From a checkpoint back to the tree nodes, seeds and resolved recipe behind it: one row for each dataset row and verdict, or for each dataset row that has no verdict.';
comment on column v_lineage.node_index is 'The judged node; without verdicts the leaf of the bad path, else of the good one.';
comment on column v_lineage.config is 'The resolved recipe of the run that made the sample.';
