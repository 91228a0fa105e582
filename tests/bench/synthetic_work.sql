-- A run at work: a training of a tenth as many optimizer steps as the store has steps, and as many episodes as a fiftieth, which a
-- second iteration plays and trains on.
update run set status = 'running', config = '{"seed": 0, "grpo": {"num_generations": 8}}';
update iteration set checkpoint_out = 'trained';

insert into iteration (iteration_id, run_id, iteration, checkpoint_in, status) values ('second', 'run', 2, 'trained', 'running');

insert into training_step (checkpoint_id, step, loss, trained_tokens, seconds, learning_rate, grad_norm)
select 'trained', n, 1 / n + random() / 10, 100 * n, n, 1e-3, random() from range(1, $steps // 10 + 1) numbers(n);

insert into timing (timing_id, iteration_id, stage, part, seconds, tokens)
select n::varchar || stage, iteration_id, stage, part, 1.5, n from range(500) numbers(n),
    (values ('iteration', 'collect', 'generate'), ('iteration', 'train', 'train'), ('second', 'reinforce', 'generate'))
        kinds(iteration_id, stage, part);

insert into trajectory
    (trajectory_id, source, iteration_id, instance_id, instance, first_observation, reward, success, stop, num_steps, given, asked,
    steps, created_at)
select left(md5('episode' || n), 16), 'rollout', 'second', 'bench/train/' || n % 100,
    {environment: 'bench', split: 'train', index: n % 100}, 'none', n % 2, n % 2 = 1, 'step_limit', 9, 0, [], [],
    timestamp '2026-01-01' + to_seconds(n)
from range($steps // 50) numbers(n);

insert into rl_step by name
select 'second' as iteration_id, n as step, random() as reward, random() as pass_at_1, random() as pass_at_n,
    random() as mixed_share, 0 as drawn_again, 100.0 as episode_tokens, 9.0 as episode_steps, 0.0 as cut_share,
    1000 as sampled_tokens, 900 as trained_tokens, 0.1 as loss, random() as entropy, 0.001 as sampler_kl, random() as clip_share,
    random() as grad_norm, 1e-4 as learning_rate, 9.0 as sampling_seconds, 3.0 as training_seconds
from range(1, least($steps // 100, 2000) + 1) numbers(n);

insert into rl_group by name
select 'second' as iteration_id, n as step, 0 as number, 'bench/train/' || n % 100 as instance_id, 'policy' as policy, 0 as draw,
    0 as prefix, 8 as episodes, 4 as wins, 0.5 as reward, true as contrast
from range(1, least($steps // 100, 2000) + 1) numbers(n);
