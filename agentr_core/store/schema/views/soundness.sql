-- What a sound store has none of.

create view v_orphans as
select 'iteration' as child, 'run_id' as reference, run_id as missing_id from iteration anti join run using (run_id)
union all select 'tree', 'iteration_id', iteration_id from tree anti join iteration using (iteration_id)
union all select 'tree', 'instance_id', instance_id from tree anti join instance using (instance_id)
union all select 'node', 'tree_id', tree_id from node anti join tree using (tree_id)
union all select 'node', 'parent', n.tree_id || '/' || n.parent from node n anti join node p on p.tree_id = n.tree_id and p.node_index = n.parent where n.node_index > 0
union all select 'judgement', 'node_index', j.tree_id || '/' || j.node_index from judgement j anti join node n using (tree_id, node_index)
union all select 'judgement', 'iteration_id', iteration_id from judgement anti join iteration using (iteration_id)
union all select 'trajectory', 'instance_id', instance_id from trajectory anti join instance using (instance_id)
union all select 'trajectory', 'iteration_id', iteration_id from trajectory anti join iteration using (iteration_id) where iteration_id is not null
union all select 'trajectory', 'evaluation_id', evaluation_id from trajectory anti join evaluation using (evaluation_id) where evaluation_id is not null
union all select 'trajectory', 'tree_id', tree_id from trajectory t anti join node n on n.tree_id = t.tree_id and n.node_index = t.leaf where t.tree_id is not null
union all select 'note', 'trajectory_id', trajectory_id from note anti join trajectory using (trajectory_id)
union all select 'instance_facts', 'instance_id', instance_id from instance_facts anti join instance using (instance_id)
union all select 'regrade', 'trajectory_id', trajectory_id from regrade anti join trajectory using (trajectory_id)
union all select 'regrade', 'scoring_id', scoring_id from regrade anti join scoring using (scoring_id)
union all select 'leaf_regrade', 'leaf', g.tree_id || '/' || g.leaf from leaf_regrade g anti join node n on n.tree_id = g.tree_id and n.node_index = g.leaf
union all select 'leaf_regrade', 'scoring_id', scoring_id from leaf_regrade anti join scoring using (scoring_id)
union all select 'pair', 'iteration_id', iteration_id from pair anti join iteration using (iteration_id)
union all select 'pair', 'good_leaf', p.tree_id || '/' || good_leaf from pair p anti join node n on n.tree_id = p.tree_id and n.node_index = p.good_leaf
union all select 'pair', 'bad_leaf', p.tree_id || '/' || bad_leaf from pair p anti join node n on n.tree_id = p.tree_id and n.node_index = p.bad_leaf
union all select 'critique', 'pair_id', pair_id from critique anti join pair using (pair_id)
union all select 'sample', 'iteration_id', iteration_id from sample anti join iteration using (iteration_id)
union all select 'sample', 'instance_id', instance_id from sample anti join instance using (instance_id) where instance_id is not null
union all select 'sample', 'pair_id', pair_id from sample anti join pair using (pair_id) where pair_id is not null
union all select 'sample', 'trajectory_id', trajectory_id from sample anti join trajectory using (trajectory_id) where trajectory_id is not null
union all select 'sample', 'tree_id', tree_id from sample anti join tree using (tree_id) where tree_id is not null
union all select 'rejection', 'iteration_id', iteration_id from rejection anti join iteration using (iteration_id)
union all select 'dataset', 'iteration_id', iteration_id from dataset anti join iteration using (iteration_id)
union all select 'dataset_row', 'dataset_id', dataset_id from dataset_row anti join dataset using (dataset_id)
union all select 'dataset_row', 'sample_id', sample_id from dataset_row anti join sample using (sample_id)
union all select 'checkpoint', 'parent_id', parent_id from checkpoint c anti join checkpoint p on p.checkpoint_id = c.parent_id where c.parent_id is not null
union all select 'checkpoint', 'dataset_id', dataset_id from checkpoint anti join dataset using (dataset_id) where dataset_id is not null
union all select 'evaluation', 'iteration_id', iteration_id from evaluation anti join iteration using (iteration_id)
union all select 'evaluation', 'checkpoint_id', checkpoint_id from evaluation anti join checkpoint using (checkpoint_id)
union all select 'episode', 'evaluation_id', evaluation_id from episode anti join evaluation using (evaluation_id)
union all select 'episode', 'trajectory_id', trajectory_id from episode anti join trajectory using (trajectory_id)
union all select 'event', 'run_id', run_id from event anti join run using (run_id)
union all select 'timing', 'iteration_id', iteration_id from timing anti join iteration using (iteration_id)
union all select 'alarm', 'iteration_id', iteration_id from alarm anti join iteration using (iteration_id)
union all select 'preference', 'iteration_id', iteration_id from preference anti join iteration using (iteration_id)
union all select 'preference', 'instance_id', instance_id from preference anti join instance using (instance_id) where instance_id is not null
union all select 'preference', 'chosen_sample_id', chosen_sample_id from preference p anti join sample s on s.sample_id = p.chosen_sample_id
union all select 'preference', 'rejected_sample_id', rejected_sample_id from preference p anti join sample s on s.sample_id = p.rejected_sample_id
union all select 'training_step', 'checkpoint_id', checkpoint_id from training_step anti join checkpoint using (checkpoint_id)
union all select 'stage_input', 'run_id', run_id from stage_input anti join run using (run_id)
union all select 'tree', 'copied_from', t.copied_from from tree t anti join tree o on o.tree_id = t.copied_from where t.copied_from is not null
union all select 'judgement', 'copied_from', j.copied_from from judgement j anti join tree o on o.tree_id = j.copied_from where j.copied_from is not null
union all select 'trajectory', 'copied_from', t.copied_from from trajectory t anti join trajectory o on o.trajectory_id = t.copied_from where t.copied_from is not null
union all select 'chosen_instance', 'iteration_id', iteration_id from chosen_instance anti join iteration using (iteration_id)
union all select 'chosen_instance', 'instance_id', instance_id from chosen_instance anti join instance using (instance_id)
union all select 'planned_rollout', 'iteration_id', iteration_id from planned_rollout anti join iteration using (iteration_id)
union all select 'planned_rollout', 'instance_id', instance_id from planned_rollout anti join instance using (instance_id)
union all select 'derivation', 'child_id', child_id from derivation d anti join trajectory t on t.trajectory_id = d.child_id
union all select 'derivation', 'parent_id', parent_id from derivation d anti join trajectory t on t.trajectory_id = d.parent_id
union all select 'derivation', 'iteration_id', iteration_id from derivation anti join iteration using (iteration_id)
union all select 'rl_step', 'iteration_id', iteration_id from rl_step anti join iteration using (iteration_id)
union all select 'rl_group', 'iteration_id', iteration_id from rl_group anti join iteration using (iteration_id)
union all select 'rl_group', 'instance_id', instance_id from rl_group anti join instance using (instance_id)
union all select 'rl_rollout', 'number', trajectory_id from rl_rollout anti join rl_group using (iteration_id, step, number)
union all select 'rl_rollout', 'trajectory_id', trajectory_id from rl_rollout anti join trajectory using (trajectory_id)
union all select 'iteration', 'promoted', promoted from iteration i anti join checkpoint c on c.checkpoint_id = i.promoted where promoted is not null
union all select 'rl_validation', 'iteration_id', iteration_id from rl_validation anti join iteration using (iteration_id)
union all select 'rl_validation', 'trajectory_id', trajectory_id from rl_validation anti join trajectory using (trajectory_id)
union all select 'rl_credit', 'trajectory_id', trajectory_id from rl_credit anti join rl_rollout using (trajectory_id)
union all select 'rl_score', 'trajectory_id', trajectory_id from rl_score anti join rl_rollout using (trajectory_id)
union all select 'family', 'iteration_id', iteration_id from family anti join iteration using (iteration_id)
union all select 'family', 'instance_id', instance_id from family anti join instance using (instance_id)
union all select 'family', 'checkpoint_id', checkpoint_id from family anti join checkpoint using (checkpoint_id)
union all select 'edit', 'iteration_id', iteration_id from edit anti join iteration using (iteration_id)
union all select 'assessment', 'trajectory_id', trajectory_id from assessment anti join trajectory using (trajectory_id)
union all select 'edit', 'instance_id', instance_id from edit anti join instance using (instance_id)
union all select 'selection', 'iteration_id', iteration_id from selection anti join iteration using (iteration_id)
union all select 'selection', 'instance_id', instance_id from selection anti join instance using (instance_id)
union all select 'iteration', 'collected_by', collected_by from iteration i anti join checkpoint c on c.checkpoint_id = i.collected_by where collected_by is not null
union all select 'oracle_verdict', 'node_index', o.tree_id || '/' || o.node_index from oracle_verdict o anti join node n using (tree_id, node_index);
comment on view v_orphans is 'Dangling references; a sound store has none.';

create view v_contradictions as
with children as (
    select tree_id, parent as node_index, sum(visits) as visits, sum(value_sum) as value_sum
    from node where parent >= 0 group by all
), played as (
    select trajectory_id, stop, num_steps, len(steps) as steps, steps[-1].success as success, num_steps - 1 as last
    from trajectory
)
select 'node' as kind, tree_id as id, node_index as position, 'it stopped as ' || stop || ', which its step denies' as what
from node
where (stop = 'success' and not coalesce(step.success, false)) or (stop = 'failure' and step.success)
    or (stop = 'disaster' and not coalesce(step.disaster, false))
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
select 'node', tree_id, node_index, 'it has no step' from node where parent >= 0 and step is null
union all
select 'trajectory', trajectory_id, last, 'it has ' || steps || ' steps and counts ' || num_steps from played where steps <> num_steps
union all
select 'trajectory', trajectory_id, last, 'it stopped as ' || stop || ', which its last step denies'
from played where (stop = 'success' and not success) or (stop = 'failure' and success);
comment on view v_contradictions is 'Trees and trajectories whose rows contradict each other, as when two processes wrote one of them; a sound store has none.';
