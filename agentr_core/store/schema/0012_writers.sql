-- Who grows a tree, and what no single writer can have stored.

alter table tree add column writer varchar;
comment on column tree.writer is 'The process that grows the tree, or grew it last; rows of another are refused. Null: from before there was such a mark.';
comment on column run.status is 'running, finished or failed; evaluating: there is only an evaluation of its model, which is not done.';

create view v_contradictions as
with children as (
    select tree_id, parent as node_index, sum(visits) as visits, sum(value_sum) as value_sum
    from node where parent >= 0 group by all
), played as (
    select trajectory_id, count(*) as steps, arg_max(success, position) as success, max(position) as last
    from step group by all
)
select 'node' as kind, tree_id as id, node_index as position, 'it stopped as ' || stop || ', which its step denies' as what
from node
where (stop = 'success' and not coalesce(success, false)) or (stop = 'failure' and success)
    or (stop = 'disaster' and not coalesce(disaster, false))
union all
select 'node', n.tree_id, n.node_index, 'it stopped as ' || n.stop || ' and has children'
from node n join children c using (tree_id, node_index) where n.stop is not null
union all
select 'node', n.tree_id, n.node_index, 'it has ' || n.visits || ' visits and its children ' || c.visits
from node n join children c using (tree_id, node_index)
where n.visits <> c.visits or abs(n.value_sum - c.value_sum) > 1e-6 * greatest(1, n.visits)
union all
select 'node', n.tree_id, n.node_index, 'its depth is ' || n.depth || ' and that of its parent ' || p.depth
from node n join node p on p.tree_id = n.tree_id and p.node_index = n.parent where n.depth <> p.depth + 1
union all
select 'node', n.tree_id, n.node_index, 'its parent ' || n.parent || ' is not there'
from node n anti join node p on p.tree_id = n.tree_id and p.node_index = n.parent where n.parent >= 0
union all
select 'trajectory', t.trajectory_id, p.last, 'it has ' || p.steps || ' steps and counts ' || t.num_steps
from trajectory t join played p using (trajectory_id) where p.steps <> t.num_steps or p.last <> t.num_steps - 1
union all
select 'trajectory', t.trajectory_id, p.last, 'it stopped as ' || t.stop || ', which its last step denies'
from trajectory t join played p using (trajectory_id)
where (t.stop = 'success' and not p.success) or (t.stop = 'failure' and p.success);
comment on view v_contradictions is 'Trees and trajectories whose rows contradict each other, as when two processes wrote one of them; a sound store has none.';
