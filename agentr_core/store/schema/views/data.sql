-- From trees and episodes to the rows of datasets, and back from a checkpoint.

create view v_funnel as
with trees as (
    select iteration_id, count(*) as trees, sum(finished::int) as finished_trees from tree group by iteration_id
), leaves as (
    select t.iteration_id, count(*) as leaves
    from node n join tree t using (tree_id)
    where n.node_index > 0 and n.stop is not null
    group by t.iteration_id
), rollouts as (
    select iteration_id, count(*) as rollouts from trajectory where source = 'rollout' group by iteration_id
), pairs as (
    select iteration_id, count(*) as pairs from pair group by iteration_id
), critiques as (
    select iteration_id, count(*) as critiques, count(first_error) as errors_found from critique group by iteration_id
), splices as (
    -- A context window divides a splice into several samples.
    select *, coalesce(pair_id || coalesce(trajectory_id, ''), sample_id) as splice, provenance.extra->>'$.mode' as mode from sample
), samples as (
    select iteration_id, count(*) as samples, count(distinct splice) filter (kind = 'revision') as revisions,
        count(distinct splice) filter (kind = 'revision' and mode = 'verified') as verified
    from splices group by iteration_id
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
comment on column v_funnel.leaves is 'Nodes at which a path ended; a node that was never gone on from is none.';
comment on column v_funnel.errors_found is 'Critiques that found a bad step.';
comment on column v_funnel.rejections is 'JSON object: stage.reason to count.';
comment on column v_funnel.spliced is 'Splices made: revision samples and, in splice.mode verified, splices that failed when they were played.';
comment on column v_funnel.verified is 'Revision samples of splice.mode verified, whose splice was played live and cleared the threshold; 0 in the other modes, although in mode continued all revision samples are episodes that cleared it.';

create view v_rejections as
select i.run_id, r.recipe, i.iteration, x.stage, x.reason, x.subject, x.detail, x.created_at
from rejection x
left join iteration i using (iteration_id)
left join run r using (run_id)
order by i.run_id, i.iteration, x.stage, x.reason, x.subject;
comment on view v_rejections is 'Everything a filter turned away, with the reason.';

create view v_pairs as
with made as (
    select pair_id, count(*) as samples, min(sample_id) as sample_id from sample where pair_id is not null group by pair_id
)
select r.recipe, i.run_id, i.iteration, p.pair_id, t.instance_id, p.tree_id, p.good_leaf, p.bad_leaf, p.shared_steps, p.good_reward,
    p.bad_reward, p.gap, c.pair_id is not null as judged, c.first_error, coalesce(m.samples, 0) as samples, m.sample_id
from pair p
join tree t using (tree_id)
join iteration i on i.iteration_id = p.iteration_id
join run r using (run_id)
left join critique c using (pair_id)
left join made m using (pair_id)
order by r.started_at, i.run_id, i.iteration, p.tree_id, p.position;
comment on view v_pairs is 'Pairs of a good and a bad path of one tree, with the first error that the judge found and what was made of them.';
comment on column v_pairs.first_error is 'Position of the first bad step of the bad path, counted from 0; null where none was found.';
comment on column v_pairs.samples is 'Samples that were spliced from the pair.';

create view v_preferences as
select i.run_id, i.iteration, p.preference_id, p.kind, p.instance_id, p.chosen_reward, p.rejected_reward, p.margin, p.dropped_steps,
    p.chosen_sample_id, p.rejected_sample_id, c.trajectory_id as chosen_trajectory_id, r.trajectory_id as rejected_trajectory_id,
    coalesce(c.tree_id, r.tree_id) as tree_id, c.provenance.good_leaf as good_leaf, r.provenance.bad_leaf as bad_leaf,
    c.provenance.split as shared_steps,
    exists (from dataset_row d where d.sample_id = p.rejected_sample_id) as used
from preference p
join iteration i using (iteration_id)
left join sample c on c.sample_id = p.chosen_sample_id
left join sample r on r.sample_id = p.rejected_sample_id
order by i.run_id, i.iteration, p.preference_id;
comment on view v_preferences is 'Preference pairs with the trajectories, or the tree and its leaves, that they are made of.';
comment on column v_preferences.used is 'Whether a dataset has the pair.';

create view v_samples as
select s.sample_id, i.run_id, i.iteration, s.kind, s.instance_id, s.pair_id, s.trajectory_id, s.tree_id,
    s.provenance.good_leaf as good_leaf, s.provenance.bad_leaf as bad_leaf, s.provenance.split as shared_steps, s.provenance.cut as cut,
    s.provenance.good_reward as good_reward, s.provenance.bad_reward as bad_reward, s.num_tokens, s.num_trained_tokens,
    exists (from dataset_row d where d.sample_id = s.sample_id) as used, nullif(len(s.messages), 0) as num_messages,
    if(len(s.messages) > 0, to_json([{'role': m.role, 'text': m.text, 'train': m.train} for m in s.messages]), null) as messages,
    s.provenance.extra::json as extra, s.created_at
from sample s
left join iteration i using (iteration_id);
comment on view v_samples is 'The samples with their messages as one JSON list of role, text and train flag.';
comment on column v_samples.used is 'Whether a dataset has the sample.';

-- Every large table is read once, and only what the samples of checkpoints point at is kept: `semi join` says so, which outer
-- joins cannot.
create view v_lineage as
with picked as materialized (
    select c.checkpoint_id, c.parent_id, c.weights_sha256, d.dataset_id, d.hash, w.position as dataset_position, s.sample_id, s.kind, s.provenance.cut as cut,
        s.pair_id, s.instance_id, s.iteration_id, s.tree_id, v.position as verdict_position, v.verdict, v.reply as verdict_reply,
        coalesce(v.node_index, s.provenance.bad_leaf, s.provenance.good_leaf) as node_index
    from checkpoint c
    join dataset d using (dataset_id)
    join dataset_row w using (dataset_id)
    join sample s using (sample_id)
    left join verdict v on v.pair_id = s.pair_id
), nodes as materialized (
    select n.tree_id, n.node_index, n.depth, n.step.reply as reply, n.step.action as action, n.step.observation as observation,
        n.step.reward as reward, n.asked.seed as seed
    from node n semi join picked p on (p.tree_id, p.node_index) = (n.tree_id, n.node_index)
), trees as materialized (
    select t.tree_id, t.seed, t.checkpoint_id, t.first_observation from tree t semi join picked p on p.tree_id = t.tree_id
)
select p.checkpoint_id, p.parent_id as parent_checkpoint_id, p.weights_sha256, p.dataset_id, p.hash as dataset_hash, p.dataset_position,
    p.sample_id, p.kind, p.cut, p.pair_id, k.first_error, p.verdict_position, p.verdict, p.verdict_reply,
    n.tree_id, n.node_index, n.depth as node_depth, n.reply, n.action,
    if(n.node_index is not null, coalesce(n.observation, t.first_observation), null) as observation, n.reward as node_reward,
    p.instance_id, x.environment, x.split, x.instance_index, t.seed as tree_seed, n.seed as generation_seed,
    t.checkpoint_id as policy_checkpoint_id, i.iteration, r.run_id, r.recipe, r.config
from picked p
left join critique k using (pair_id)
left join trees t on t.tree_id = p.tree_id
left join nodes n on n.tree_id = p.tree_id and n.node_index = p.node_index
left join instance x on x.instance_id = p.instance_id
left join iteration i on i.iteration_id = p.iteration_id
left join run r on r.run_id = i.run_id;
comment on view v_lineage is 'From a checkpoint back to the tree nodes, seeds and resolved recipe behind it: one row for each dataset row and verdict, or for each dataset row that has no verdict.';
comment on column v_lineage.node_index is 'The judged node; without verdicts the leaf of the bad path, else of the good one.';
comment on column v_lineage.config is 'The resolved recipe of the run that made the sample.';
