-- Questions to begin with: `agentr sql --examples` lists them, `agentr sql --example NAME` asks one, and each may be copied
-- and changed. The first line of each is its name and what it tells; a test asks all of them.

-- success: How good each model is on each held-out set, with its 95% interval.
select recipe, run_id, iteration, evaluation, success, success_low, success_high, episodes, finished from v_iterations;

-- gains: What each iteration gained over the base model on the same episodes.
select run_id, iteration, evaluation, value as gain, low, high, n as episodes
from v_metrics where metric = 'gain_over_base' and world is null and depth is null;

-- panels: What each held-out set is: its instances and a hash of their ids, equal wherever the same ones were played.
select evaluation, count(distinct instance_id) as instances, count(*) as episodes,
    left(sha256(string_agg(instance_id || '#' || repeat, chr(10) order by instance_id, repeat)), 16) as panel, run_id, iteration
from v_episodes where cut = 0 group by all order by all;

-- outcomes: The result of every held-out episode, for `--output FILE.csv`.
select run_id, iteration, evaluation, instance_id, repeat, cut, success, reward, num_steps, stop, trajectory_id
from v_episodes order by all;

-- goals: The goals that are won least often, over all models.
select goal, count(*) as episodes, avg(success) as success from v_trajectories where evaluation is not null
group by all order by success, goal limit 20;

-- depths: Success by difficulty class.
select run_id, iteration, evaluation, depth, count(*) as episodes, avg(success) as success
from v_episodes where cut = 0 group by all order by all;

-- stops: Why held-out episodes end, by model.
select run_id, iteration, evaluation, stop, count(*) as episodes from v_episodes group by all order by all;

-- slowest: The episodes that took the longest, with what took the time.
select trajectory_id, instance_id, num_steps, sampling_seconds, environment_seconds
from v_episodes order by sampling_seconds + environment_seconds desc nulls last limit 10;

-- never: Held-out instances that no model has ever solved.
select instance_id, depth, count(*) as episodes, max(reward) as best_reward
from v_episodes where cut = 0 group by all having not max(success) order by depth, instance_id;

-- learnt: Instances that the base model failed and a later one solves.
select b.run_id, a.iteration, a.evaluation, a.instance_id, b.trajectory_id as before, a.trajectory_id as after
from v_episodes b join v_episodes a using (run_id, evaluation, instance_id, repeat, cut)
where b.iteration = 0 and a.iteration > 0 and a.success and not b.success order by all;

-- forgotten: Instances that the base model solved and a later one fails.
select b.run_id, a.iteration, a.evaluation, a.instance_id, b.trajectory_id as before, a.trajectory_id as after
from v_episodes b join v_episodes a using (run_id, evaluation, instance_id, repeat, cut)
where b.iteration = 0 and a.iteration > 0 and b.success and not a.success order by all;

-- scorings: Episodes that were scored again, old and new score side by side.
select * from v_scorings;

-- comparison: Each two models that played the same episodes: who won what.
select run_id, iteration, other_run_id, other_iteration, evaluation, episodes, gain, won, lost
from v_comparisons order by gain desc, run_id, iteration, other_run_id, other_iteration, evaluation;

-- funnel: From trees to training rows: what each stage of each iteration kept.
select run_id, iteration, trees, leaves, rollouts, pairs, critiques, errors_found, samples, dataset_rows from v_funnel;

-- rejections: What filters turned away, and why.
select run_id, iteration, stage, reason, count(*) as turned_away, min(subject) as for_example
from v_rejections group by all order by turned_away desc, stage, reason;

-- tokens: What models read and wrote, by purpose and role.
select run_id, iteration, purpose, role, replies, prompt_tokens, completion_tokens, cut from v_tokens;

-- time: Where the hours went, by stage and part.
select run_id, iteration, stage, part, sum(seconds) as seconds
from timing join iteration using (iteration_id) group by all order by seconds desc;

-- faults: What went wrong on the way, most frequent first.
select run_id, stage, class, phase, count(*) as times, min(message) as for_example from event group by all order by times desc, class, phase;

-- trees: The trees of each iteration: how large, how deep, how often they succeed.
select i.run_id, i.iteration, count(distinct n.tree_id) as trees, count(*) as nodes, max(n.depth) as deepest,
    count(*) filter (n.step.success) as successful_leaves
from node n join tree t using (tree_id) join iteration i using (iteration_id) group by all order by all;

-- mixed: Trees with both good and bad leaves, the most even ones first: what revisions are made of.
select t.tree_id, t.instance_id, count(*) filter (n.step.success) as good, count(*) filter (not n.step.success) as bad
from node n join tree t using (tree_id) where n.stop is not null
group by all having good > 0 and bad > 0 order by least(good, bad) desc, t.tree_id limit 20;

-- turning-points: Siblings whose values differ most: where one step decides.
select tree_id, parent, count(*) as siblings, max(value) - min(value) as spread, arg_max(action, value) as best, arg_min(action, value) as worst
from v_nodes where value is not null and parent >= 0 group by all having siblings > 1 order by spread desc, tree_id, parent limit 20;

-- pairs: Pairs of a good and a bad path with the first error that the judge found.
select run_id, iteration, pair_id, instance_id, shared_steps, good_reward, bad_reward, first_error, samples from v_pairs;

-- verdicts: What the judge says, and how much the judged steps lost in value.
select run_id, iteration, verdict, count(*) as steps, avg(value) as value, avg(value_drop) as value_drop
from v_critic_steps group by all order by all;

-- critic: How often judge, tree and oracle name the same first error, and how far apart they are.
select run_id, iteration, count(*) as paths, avg((judge_error is not distinct from tree_error)::integer) as judge_is_tree,
    avg((judge_error is not distinct from oracle_error)::integer) filter (has_oracle) as judge_is_oracle,
    avg(judge_after_tree) as steps_after_tree, avg(judge_after_oracle) as steps_after_oracle
from v_critic_audit group by all order by all;

-- disputed: Steps that the judge calls good and the tree's values call a mistake.
select tree_id, node_index, action, value, sibling_value, value_drop
from v_critic_steps where verdict = 'good' and value_drop > 0 order by value_drop desc, tree_id, node_index limit 20;

-- samples: What the samples of each iteration are, and how many of them are trained on.
select run_id, iteration, kind, count(*) as samples, count(*) filter (used) as used, sum(num_tokens) as tokens,
    sum(num_trained_tokens) as trained_tokens
from v_samples group by all order by all;

-- lineage: From a checkpoint to the instances, seeds and verdicts behind it.
select checkpoint_id, sample_id, kind, verdict_position, verdict, action, instance_id, tree_seed, run_id, iteration from v_lineage;

-- ancestors: From each checkpoint back to the model that it all began with.
select checkpoint_id, generation, ancestor_id, recipe, iteration, path from v_ancestors;

-- preferences: Preference pairs, by what made the difference.
select run_id, iteration, kind, count(*) as pairs, avg(margin) as margin, count(*) filter (used) as used
from v_preferences group by all order by all;

-- training: With which learning rate each model was trained, and how the loss fell.
select run_id, iteration, model, steps, learning_rate, first_loss, last_loss, trained_tokens from v_trainings;

-- curves: How each training went, step by step.
select run_id, iteration, step, loss, learning_rate, grad_norm from v_training_steps;

-- groups: Groups of reinforcement learning that taught something, by step.
select run_id, iteration, step, count(*) as groups, count(*) filter (contrast) as trained, 
    avg(reward) filter (prefix = 0) as reward, avg(wins / episodes) filter (prefix = 0) as pass_at_1,
    avg(wins / episodes) filter (prefix > 0) as recovered
from v_groups group by all order by all;

-- tools: Calls of tools: how many, how they ended, how long they took.
select run_id, iteration, source, tool, status, calls, cached, seconds from v_tool_calls;

-- families: What each operator of a flywheel made of trajectories.
select run_id, iteration, operator, count(*) as trajectories, avg(success) as success, avg(calls) as calls
from v_families group by all order by all;

-- words: Replies with a word, with where they were said; the viewer's search does the same with an index.
select tree_id, node_index, reply from v_nodes where reply ilike '%look%' order by all limit 20;

-- soundness: Rows that point nowhere; a sound store has none.
select * from v_orphans;

-- schema: All tables and views with what they are.
select table_name as name, 'table' as kind, comment as what from duckdb_tables()
where schema_name = 'main' and database_name = current_database()
union all select view_name, 'view', comment from duckdb_views()
where not internal and database_name = current_database() and not regexp_matches(view_name, '_\d+$')
order by kind, name;
