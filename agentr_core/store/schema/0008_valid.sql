-- Whether an environment took an action: a refused one is a mistake of the agent, in every world's own words.

alter table node add column valid boolean;
comment on column node.valid is 'Whether the environment took the action; null where it does not tell.';
alter table step add column valid boolean;
comment on column step.valid is 'As node.valid.';

create or replace view v_nodes as
select n.tree_id, t.instance_id, t.iteration_id, n.node_index, n.parent, n.depth, r.text as reply, n.action, n.matched, n.valid, o.text as observation,
    n.reward, n.terminated, n.success, n.disaster, n.visits, n.value_sum / nullif(n.visits, 0) as value, n.terminal, n.stop,
    n.dive, n.duplicates, g.seed, g.prompt_tokens, g.completion_tokens, n.created_at
from node n
join tree t using (tree_id)
left join text r on r.text_id = n.reply_id
left join text o on o.text_id = coalesce(n.observation_id, t.first_observation_id)
left join generation g on g.kind = 'node' and g.owner_id = n.tree_id and g.position = n.node_index and g.draw = n.draw;
comment on view v_nodes is 'The nodes of all trees with their texts; the observation of a root is the first one.';

create or replace view v_steps as
select s.trajectory_id, t.source, t.instance_id, t.iteration_id, t.evaluation_id, s.position, r.text as reply, s.action, s.matched, s.valid,
    o.text as observation, s.reward, s.terminated, s.success, s.disaster, g.seed, g.prompt_tokens, g.completion_tokens
from step s
join trajectory t using (trajectory_id)
join text r on r.text_id = s.reply_id
join text o on o.text_id = s.observation_id
left join generation g on g.kind = 'step' and g.owner_id = s.trajectory_id and g.position = s.position and g.draw = s.draw
order by s.trajectory_id, s.position;
comment on view v_steps is 'The steps of all trajectories with their texts.';
