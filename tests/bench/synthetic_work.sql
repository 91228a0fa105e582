-- A run at work: a training of a tenth as many optimizer steps as the store has steps, and as many episodes as a fiftieth, which a
-- second iteration plays and trains on.
update run set status = 'running', config = '{"name": "bench", "method": "grpo", "seed": 0, "model": {"path": "m"},
    "environment": {"name": "bench"}, "grpo": {"num_generations": 8}}';
update iteration set checkpoint_out = 'trained';

insert into iteration (iteration_id, run_id, iteration, checkpoint_in, status) values ('second', 'run', 2, 'trained', 'running');

insert into training_step (checkpoint_id, step, loss, trained_tokens, seconds, learning_rate, grad_norm)
select 'trained', n, 1 / n + random() / 10, 100 * n, n, 1e-3, random() from range(1, $steps // 10 + 1) numbers(n);

insert into timing (timing_id, iteration_id, stage, part, seconds, tokens)
select n::varchar || stage, iteration_id, stage, part, 1.5, n from range(500) numbers(n),
    (values ('iteration', 'collect', 'generate'), ('iteration', 'train', 'train'), ('second', 'reinforce', 'generate'))
        kinds(iteration_id, stage, part);

-- Episodes of nine steps, the fifth of which is refused: rollouts in groups of eight, and two evaluations of the same instances.
create temp table played as
select left(md5('episode' || n), 16) as trajectory_id, 'rollout' as source, 'second' as iteration_id, null as evaluation_id,
    'bench/train/' || n // 8 % 100 as instance_id, n, n % 2 = 1 as success
from range($steps // 50) numbers(n)
union all
select left(md5(evaluation_id || n), 16), 'episode', null, evaluation_id, 'bench/train/' || n, n, (n + shift) % 3 = 0
from range($steps // 1000) numbers(n), (values ('before', 0), ('after', 1)) evaluations(evaluation_id, shift);

insert into trajectory
    (trajectory_id, source, iteration_id, evaluation_id, instance_id, instance, first_observation, reward, success, stop, num_steps,
    given, asked, steps, created_at)
select trajectory_id, source, iteration_id, evaluation_id, instance_id,
    {environment: 'bench', split: 'train', index: split_part(instance_id, '/', 3)::bigint}, 'Goal: craft ' || instance_id,
    success::int, success, case when success then 'success' else 'step_limit' end, 9, 0, [],
    [{
        'reply': 'Thought: episode ' || n || ' looks for its item.', 'action': 'get ' || (n * 7 + s) % 11 || ' stick',
        'observation': 'Observation ' || (n + s) % 100 || ' of many.', 'reward': 0.0, 'matched': null, 'valid': s <> 4,
        'terminated': false, 'success': success and s = 8, 'disaster': false, 'token_ids': [s, s + 1, s + 2, s + 3],
        'logprobs': null, 'finish_reason': 'stop', 'tokenizer': null, 'dropped': 0, 'tool_calls': [], 'answers': []
    } for s in range(9)],
    timestamp '2026-01-01' + to_seconds(n)
from played;

insert into evaluation (evaluation_id, iteration_id, checkpoint_id, name, split, config, finished)
values ('before', 'iteration', 'policy', 'test', 'train', '{}', true), ('after', 'second', 'trained', 'test', 'train', '{}', true);

insert into episode (evaluation_id, instance_id, repeat, cut, trajectory_id)
select evaluation_id, instance_id, 0, 0, trajectory_id from played where source = 'episode';

insert into metric (scope, scope_id, name, value, low, high, n)
select 'evaluation', evaluation_id, name, 0.3, 0.2, 0.4, $steps // 1000
from (values ('before'), ('after')) evaluations(evaluation_id), (values ('success'), ('success_clustered'), ('reward')) names(name);

insert into rl_rollout (trajectory_id, iteration_id, step, number, episode, advantage)
select trajectory_id, 'second', 1 + n // 8, 0, n % 8, n % 2 - 0.5 from played where source = 'rollout' and n // 8 < least($steps // 100, 2000);

drop table played;

insert into rl_step by name
select 'second' as iteration_id, n as step, random() as reward, random() as pass_at_1, random() as pass_at_n,
    random() as mixed_share, 0 as drawn_again, 100.0 as episode_tokens, 9.0 as episode_steps, 0.0 as cut_share,
    1000 as sampled_tokens, 900 as trained_tokens, 0.1 as loss, random() as entropy, 0.001 as sampler_kl, random() as clip_share,
    random() as grad_norm, 1e-4 as learning_rate, 9.0 as sampling_seconds, 3.0 as training_seconds
from range(1, least($steps // 100, 2000) + 1) numbers(n);

insert into rl_group by name
select 'second' as iteration_id, n as step, 0 as number, 'bench/train/' || (n - 1) % 100 as instance_id, 'policy' as policy, 0 as draw,
    0 as prefix, 8 as episodes, 4 as wins, 0.5 as reward, true as contrast
from range(1, least($steps // 100, 2000) + 1) numbers(n);

-- All that was played is scored again: one in three otherwise.
insert into scoring (scoring_id, grader, settings) values ('scoring', 'regex', '{}');
insert into regrade (scoring_id, trajectory_id, reward, success)
select 'scoring', trajectory_id, if(hash(trajectory_id) % 3 = 0, 1 - reward, reward),
    if(hash(trajectory_id) % 3 = 0, not success, success) from trajectory;
insert into leaf_regrade (scoring_id, tree_id, leaf, old_reward, old_success, reward, success)
select 'scoring', tree_id, node_index, step.reward, step.success, if(hash(tree_id, node_index) % 3 = 0, 1 - step.reward, step.reward),
    if(hash(tree_id, node_index) % 3 = 0, not step.success, step.success) from node where node_index > 76;
