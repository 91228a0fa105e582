create view v_evaluations as
with counted as (
    select e.evaluation_id, count(*) as n, avg(t.success::int) as p, avg(t.reward) as reward, avg(t.num_steps) as steps
    from episode e join trajectory t using (trajectory_id)
    group by e.evaluation_id
), bounds as (
    -- Wilson's interval at 95%: z = 1.959964
    select *, (p + 1.9207294 / n) / (1 + 3.8414588 / n) as centre,
        1.959964 * sqrt(p * (1 - p) / n + 0.9603647 / (n * n)) / (1 + 3.8414588 / n) as half
    from counted
)
select r.run_id, r.recipe, i.iteration, e.name as evaluation, e.split, e.evaluation_id, e.checkpoint_id, e.finished,
    b.p as success, greatest(0, b.centre - b.half) as success_low, least(1, b.centre + b.half) as success_high,
    b.reward, b.steps, coalesce(b.n, 0) as episodes
from evaluation e
join iteration i using (iteration_id)
join run r using (run_id)
left join bounds b using (evaluation_id)
order by r.started_at, r.run_id, i.iteration, e.name, e.split;
comment on view v_evaluations is 'Success share with its 95% Wilson interval and mean reward of every evaluation.';

create view v_iterations as
select v.run_id, v.recipe, v.iteration, v.evaluation, v.split, v.checkpoint_id,
    v.success, v.success_low, v.success_high, v.reward, v.steps, v.episodes,
    x.success as revision_success, x.success_low as revision_success_low, x.success_high as revision_success_high,
    x.reward as revision_reward, coalesce(x.episodes, 0) as revision_episodes
from v_evaluations v
left join v_evaluations x
    on x.evaluation = 'revision_test' and (x.run_id, x.iteration, x.split, x.checkpoint_id) = (v.run_id, v.iteration, v.split, v.checkpoint_id)
where v.evaluation <> 'revision_test'
order by v.run_id, v.iteration, v.split;
comment on view v_iterations is 'How good the policy is after each iteration (0: the model the run starts from), one row for each split; revision_ columns: recovery from failed prefixes.';

create view v_nodes as
select n.tree_id, t.instance_id, t.iteration_id, n.node_index, n.parent, n.depth, r.text as reply, n.action, o.text as observation,
    n.reward, n.terminated, n.success, n.disaster, n.visits, n.value_sum / nullif(n.visits, 0) as value, n.terminal, n.stop,
    n.dive, n.duplicates, g.seed, g.prompt_tokens, g.completion_tokens, n.created_at
from node n
join tree t using (tree_id)
left join text r on r.text_id = n.reply_id
left join text o on o.text_id = coalesce(n.observation_id, t.first_observation_id)
left join generation g on g.kind = 'node' and g.owner_id = n.tree_id and g.position = n.node_index and g.draw = n.draw;
comment on view v_nodes is 'The nodes of all trees with their texts; the observation of a root is the first one.';

create view v_steps as
select s.trajectory_id, t.source, t.instance_id, t.iteration_id, t.evaluation_id, s.position, r.text as reply, s.action,
    o.text as observation, s.reward, s.terminated, s.success, s.disaster, g.seed, g.prompt_tokens, g.completion_tokens
from step s
join trajectory t using (trajectory_id)
join text r on r.text_id = s.reply_id
join text o on o.text_id = s.observation_id
left join generation g on g.kind = 'step' and g.owner_id = s.trajectory_id and g.position = s.position and g.draw = s.draw
order by s.trajectory_id, s.position;
comment on view v_steps is 'The steps of all trajectories with their texts.';

create view v_samples as
with conversation as (
    select m.sample_id, count(*) as num_messages,
        to_json(list({'role': m.role, 'text': t.text, 'train': m.train} order by m.position)) as messages
    from message m join text t using (text_id)
    group by m.sample_id
)
select s.sample_id, i.run_id, i.iteration, s.kind, s.instance_id, s.pair_id, s.trajectory_id, s.tree_id, s.good_leaf, s.bad_leaf,
    s.shared_steps, s.cut, s.good_reward, s.bad_reward, s.num_tokens, s.num_trained_tokens,
    exists (from dataset_row d where d.sample_id = s.sample_id) as used, c.num_messages, c.messages, s.extra, s.created_at
from sample s
left join iteration i using (iteration_id)
left join conversation c using (sample_id);
comment on view v_samples is 'The samples with their messages as one JSON list of role, text and train flag.';
comment on column v_samples.used is 'Whether a dataset has the sample.';

create view v_rejections as
select i.run_id, r.recipe, i.iteration, x.stage, x.reason, x.subject, x.detail, x.created_at
from rejection x
left join iteration i using (iteration_id)
left join run r using (run_id)
order by i.run_id, i.iteration, x.stage, x.reason, x.subject;
comment on view v_rejections is 'Everything a filter turned away, with the reason.';

create view v_funnel as
with trees as (
    select iteration_id, count(*) as trees, sum(finished::int) as finished_trees from tree group by iteration_id
), leaves as (
    select t.iteration_id, count(*) as leaves
    from node n join tree t using (tree_id)
    where n.node_index > 0 and not exists (from node c where c.tree_id = n.tree_id and c.parent = n.node_index)
    group by t.iteration_id
), rollouts as (
    select iteration_id, count(*) as rollouts from trajectory where source = 'rollout' group by iteration_id
), pairs as (
    select iteration_id, count(*) as pairs from pair group by iteration_id
), critiques as (
    select iteration_id, count(*) as critiques, count(first_error) as errors_found from critique group by iteration_id
), samples as (
    select s.iteration_id, count(*) as samples, count(*) filter (s.kind = 'revision') as revisions,
        count(*) filter (s.kind = 'revision' and (s.extra->>'$.mode') = 'verified') as verified
    from sample s group by s.iteration_id
), rows_kept as (
    select d.iteration_id, count(*) as dataset_rows from dataset d join dataset_row using (dataset_id) group by d.iteration_id
), reasons as (
    select iteration_id, stage, stage || '.' || reason as reason, count(*) as n from rejection group by all
), rejections as (
    select iteration_id, sum(n)::bigint as rejected, coalesce(sum(n) filter (stage = 'splice' and reason like 'splice.verify-%'), 0)::bigint as failed,
        to_json(map_from_entries(list((reason, n) order by reason))) as rejections
    from reasons group by iteration_id
)
select r.run_id, r.recipe, i.iteration, i.iteration_id, coalesce(trees, 0) as trees, coalesce(finished_trees, 0)::bigint as finished_trees,
    coalesce(leaves, 0) as leaves, coalesce(rollouts, 0) as rollouts, coalesce(pairs, 0) as pairs, coalesce(critiques, 0) as critiques,
    coalesce(errors_found, 0) as errors_found, coalesce(revisions, 0) + coalesce(failed, 0) as spliced, coalesce(verified, 0) as verified,
    coalesce(samples, 0) as samples, coalesce(dataset_rows, 0) as dataset_rows, coalesce(rejected, 0) as rejected,
    coalesce(rejections, '{}') as rejections
from iteration i
join run r using (run_id)
left join trees using (iteration_id)
left join leaves using (iteration_id)
left join rollouts using (iteration_id)
left join pairs using (iteration_id)
left join critiques using (iteration_id)
left join samples using (iteration_id)
left join rows_kept using (iteration_id)
left join rejections using (iteration_id)
order by r.started_at, r.run_id, i.iteration;
comment on view v_funnel is 'From trees to dataset rows: what each stage of an iteration kept and turned away.';
comment on column v_funnel.leaves is 'Nodes without children.';
comment on column v_funnel.errors_found is 'Critiques that found a bad step.';
comment on column v_funnel.spliced is 'Splices made: revision samples, and splices that failed when they were played.';
comment on column v_funnel.verified is 'Revision samples whose splice was played live and still cleared the threshold.';
comment on column v_funnel.rejections is 'JSON object: stage.reason to count.';

create view v_lineage as
select c.checkpoint_id, c.parent_id as parent_checkpoint_id, c.weights_sha256, d.dataset_id, d.hash as dataset_hash, w.position as dataset_position,
    s.sample_id, s.kind, s.cut, s.pair_id, k.first_error, v.position as verdict_position, v.verdict, j.text as verdict_reply,
    n.tree_id, n.node_index, n.depth as node_depth, n.reply, n.action, n.observation, n.reward as node_reward,
    s.instance_id, x.environment, x.split, x.instance_index, t.seed as tree_seed, n.seed as generation_seed,
    t.checkpoint_id as policy_checkpoint_id, i.iteration, r.run_id, r.recipe, r.config
from checkpoint c
join dataset d using (dataset_id)
join dataset_row w using (dataset_id)
join sample s using (sample_id)
left join critique k using (pair_id)
left join verdict v on v.pair_id = s.pair_id
left join text j on j.text_id = v.reply_id
left join tree t on t.tree_id = s.tree_id
left join v_nodes n on n.tree_id = s.tree_id and n.node_index = coalesce(v.node_index, s.bad_leaf, s.good_leaf)
left join instance x on x.instance_id = s.instance_id
left join iteration i on i.iteration_id = s.iteration_id
left join run r on r.run_id = i.run_id;
comment on view v_lineage is 'From a checkpoint back to the tree nodes, seeds and resolved recipe behind it: one row for each dataset row and verdict, or for each dataset row that has no verdict.';
comment on column v_lineage.node_index is 'The judged node; without verdicts the leaf of the bad path, else of the good one.';
comment on column v_lineage.config is 'The resolved recipe of the run that made the sample.';

create view v_orphans as
select 'iteration' as child, 'run_id' as reference, run_id as missing_id from iteration anti join run using (run_id)
union all select 'tree', 'iteration_id', iteration_id from tree anti join iteration using (iteration_id)
union all select 'tree', 'instance_id', instance_id from tree anti join instance using (instance_id)
union all select 'tree', 'first_observation_id', first_observation_id from tree t anti join text x on x.text_id = t.first_observation_id
union all select 'node', 'tree_id', tree_id from node anti join tree using (tree_id)
union all select 'node', 'parent', n.tree_id || '/' || n.parent from node n anti join node p on p.tree_id = n.tree_id and p.node_index = n.parent where n.node_index > 0
union all select 'node', 'reply_id', reply_id from node n anti join text x on x.text_id = n.reply_id where reply_id is not null
union all select 'node', 'observation_id', observation_id from node n anti join text x on x.text_id = n.observation_id where observation_id is not null
union all select 'generation', 'owner_id', owner_id from generation g anti join node n on n.tree_id = g.owner_id and n.node_index = g.position where g.kind = 'node'
union all select 'generation', 'owner_id', owner_id from generation g anti join step s on s.trajectory_id = g.owner_id and s.position = g.position where g.kind = 'step'
union all select 'generation', 'owner_id', owner_id from generation g anti join judgement j on j.tree_id = g.owner_id and j.node_index = g.position where g.kind = 'judgement'
union all select 'generation', 'reply_id', reply_id from generation g anti join text x on x.text_id = g.reply_id
union all select 'judgement', 'node_index', j.tree_id || '/' || j.node_index from judgement j anti join node n using (tree_id, node_index)
union all select 'judgement', 'iteration_id', iteration_id from judgement anti join iteration using (iteration_id)
union all select 'trajectory', 'instance_id', instance_id from trajectory anti join instance using (instance_id)
union all select 'trajectory', 'iteration_id', iteration_id from trajectory anti join iteration using (iteration_id) where iteration_id is not null
union all select 'trajectory', 'evaluation_id', evaluation_id from trajectory anti join evaluation using (evaluation_id) where evaluation_id is not null
union all select 'trajectory', 'first_observation_id', first_observation_id from trajectory t anti join text x on x.text_id = t.first_observation_id
union all select 'trajectory', 'tree_id', tree_id from trajectory t anti join node n on n.tree_id = t.tree_id and n.node_index = t.leaf where t.tree_id is not null
union all select 'step', 'trajectory_id', trajectory_id from step anti join trajectory using (trajectory_id)
union all select 'step', 'reply_id', reply_id from step s anti join text x on x.text_id = s.reply_id
union all select 'step', 'observation_id', observation_id from step s anti join text x on x.text_id = s.observation_id
union all select 'pair', 'iteration_id', iteration_id from pair anti join iteration using (iteration_id)
union all select 'pair', 'good_leaf', p.tree_id || '/' || good_leaf from pair p anti join node n on n.tree_id = p.tree_id and n.node_index = p.good_leaf
union all select 'pair', 'bad_leaf', p.tree_id || '/' || bad_leaf from pair p anti join node n on n.tree_id = p.tree_id and n.node_index = p.bad_leaf
union all select 'critique', 'pair_id', pair_id from critique anti join pair using (pair_id)
union all select 'verdict', 'pair_id', pair_id from verdict anti join critique using (pair_id)
union all select 'verdict', 'reply_id', reply_id from verdict v anti join text x on x.text_id = v.reply_id
union all select 'sample', 'iteration_id', iteration_id from sample anti join iteration using (iteration_id)
union all select 'sample', 'instance_id', instance_id from sample anti join instance using (instance_id) where instance_id is not null
union all select 'sample', 'pair_id', pair_id from sample anti join pair using (pair_id) where pair_id is not null
union all select 'sample', 'trajectory_id', trajectory_id from sample anti join trajectory using (trajectory_id) where trajectory_id is not null
union all select 'sample', 'tree_id', tree_id from sample anti join tree using (tree_id) where tree_id is not null
union all select 'message', 'sample_id', sample_id from message anti join sample using (sample_id)
union all select 'message', 'text_id', text_id from message anti join text using (text_id)
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
union all select 'timing', 'iteration_id', iteration_id from timing anti join iteration using (iteration_id);
comment on view v_orphans is 'Dangling references; a sound store has none.';
