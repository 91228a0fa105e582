-- What an environment that knows the truth says of judged paths, and views from which a question starts: episodes, tokens,
-- pairs, groups, runs beside each other, and judges beside the trees that they judge.

create table oracle_verdict (
    tree_id varchar not null,
    node_index integer not null,
    verdict varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table oracle_verdict is 'The true verdict on a step of a judged path, where the environment knows it; a report of an iteration asks for it and stores it.';
comment on column oracle_verdict.verdict is 'good, bad or uncertain.';

alter view v_orphans rename to v_orphans_0025;
comment on view v_orphans_0025 is 'Dangling references of the tables of the first 25 migrations; v_orphans has them too.';
create view v_orphans as
from v_orphans_0025
union all select 'oracle_verdict', 'node_index', o.tree_id || '/' || o.node_index from oracle_verdict o anti join node n using (tree_id, node_index);
comment on view v_orphans is 'Dangling references; a sound store has none.';

create view v_episodes as
select r.recipe, i.run_id, i.iteration, e.name as evaluation, e.split, x.environment, p.instance_id, x.depth, x.origin_id, p.repeat, p.cut,
    t.success, t.reward, t.stop, t.num_steps, p.invalid_actions, p.sampling_seconds, p.environment_seconds,
    p.trajectory_id, p.evaluation_id, e.checkpoint_id
from episode p
join evaluation e using (evaluation_id)
join trajectory t using (trajectory_id)
join iteration i on i.iteration_id = e.iteration_id
join run r using (run_id)
left join instance x on x.instance_id = p.instance_id
order by r.started_at, i.run_id, i.iteration, e.name, p.instance_id, p.repeat, p.cut;
comment on view v_episodes is 'The episodes of all evaluations: which model played which instance, and how it ended.';
comment on column v_episodes.iteration is 'The one that made the model; 0: the model that the run begins with.';
comment on column v_episodes.depth is 'Difficulty class, where the environment has one.';
comment on column v_episodes.cut is 'Steps that were replayed before the model took over; 0 but in a revision test.';
comment on column v_episodes.num_steps is 'Steps, replayed ones included.';

create view v_tokens as
with spent as (
    select t.iteration_id, 'collected' as purpose, 'actor' as role, g.prompt_tokens, g.completion_tokens, g.finish_reason
    from generation g join tree t on t.tree_id = g.owner_id where g.kind = 'node' and t.copied_from is null
    union all
    select j.iteration_id, 'judged', 'judge', g.prompt_tokens, g.completion_tokens, g.finish_reason
    from generation g join judgement j on (j.tree_id, j.node_index) = (g.owner_id, g.position)
    where g.kind = 'judgement' and j.copied_from is null
    union all
    select t.iteration_id, if(t.source in ('episode', 'validation'), 'evaluated', 'collected'), 'actor', g.prompt_tokens,
        g.completion_tokens, g.finish_reason
    from generation g join trajectory t on t.trajectory_id = g.owner_id
    where g.kind = 'step' and g.seed is not null and t.copied_from is null
        and t.source in ('episode', 'rollout', 'validation', 'flywheel')
    union all
    select coalesce(t.iteration_id, s.iteration_id), a.purpose, a.role, a.prompt_tokens, a.completion_tokens, a.finish_reason
    from answer a
    left join tree t on a.kind = 'node' and t.tree_id = a.owner_id
    left join trajectory s on a.kind = 'step' and s.trajectory_id = a.owner_id
    where a.given is not true and coalesce(t.copied_from, s.copied_from) is null and coalesce(s.source, '') <> 'ungraded'
    union all
    select iteration_id, 'edited', role, prompt_tokens, completion_tokens, finish_reason from edit
)
select r.recipe, i.run_id, i.iteration, s.purpose, s.role, count(*) as replies, coalesce(sum(s.prompt_tokens), 0)::bigint as prompt_tokens,
    coalesce(sum(s.completion_tokens), 0)::bigint as completion_tokens, count(*) filter (s.finish_reason = 'length') as cut
from spent s
join iteration i using (iteration_id)
join run r using (run_id)
group by all
order by min(r.started_at), i.run_id, i.iteration, s.purpose, s.role;
comment on view v_tokens is 'Tokens that models read and wrote, by iteration, purpose and role; copies of another run''s replies are left out.';
comment on column v_tokens.purpose is 'collected, judged, evaluated or edited; step, grade and other purposes of table answer: asked on the side of an episode.';
comment on column v_tokens.prompt_tokens is 'A prompt counts once for each of its replies.';
comment on column v_tokens.cut is 'Replies that their token limit cut, of those for which this is known.';

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

create view v_groups as
with spread as (
    select o.iteration_id, o.step, o.number, stddev_pop(t.reward) as reward_deviation, min(o.advantage) as advantage_low,
        max(o.advantage) as advantage_high, avg(t.num_steps) as steps
    from rl_rollout o join trajectory t using (trajectory_id)
    group by all
)
select r.recipe, i.run_id, i.iteration, g.step, g.number, g.instance_id, x.depth, g.policy, g.draw, g.episodes, g.wins, g.reward,
    s.reward_deviation, s.advantage_low, s.advantage_high, s.steps, g.contrast
from rl_group g
join iteration i on i.iteration_id = g.iteration_id
join run r using (run_id)
left join instance x on x.instance_id = g.instance_id
left join spread s on (s.iteration_id, s.step, s.number) = (g.iteration_id, g.step, g.number)
order by r.started_at, i.run_id, i.iteration, g.step, g.number;
comment on view v_groups is 'Groups of reinforcement learning: the episodes of one instance in one step, how they ended and what they taught.';
comment on column v_groups.contrast is 'Whether the group was trained on: what its episodes are worth differs.';
comment on column v_groups.steps is 'Mean steps of its episodes.';

create view v_comparisons as
with played as (
    select i.run_id, i.iteration, e.name as evaluation, e.split, p.instance_id, p.repeat, p.cut, t.success, t.reward
    from episode p
    join evaluation e using (evaluation_id)
    join trajectory t using (trajectory_id)
    join iteration i on i.iteration_id = e.iteration_id
)
select a.run_id, a.iteration, b.run_id as other_run_id, b.iteration as other_iteration, a.evaluation, a.split, count(*) as episodes,
    avg(a.success::integer) as success, avg(b.success::integer) as other_success,
    avg(a.success::integer - b.success::integer) as gain, count(*) filter (a.success and not b.success) as won,
    count(*) filter (b.success and not a.success) as lost, avg(a.reward - b.reward) as reward_gain
from played a
join played b using (evaluation, split, instance_id, repeat, cut)
where (a.run_id, a.iteration) <> (b.run_id, b.iteration)
group by a.run_id, a.iteration, b.run_id, b.iteration, a.evaluation, a.split;
comment on view v_comparisons is 'Each two models that played the same episodes of a set, side by side; `agentr report RUN RUN` has the intervals.';
comment on column v_comparisons.episodes is 'Episodes that both played: same instance, number and cut.';
comment on column v_comparisons.gain is 'success - other_success.';
comment on column v_comparisons.won is 'Episodes that it won and the other did not.';
comment on column v_comparisons.lost is 'Episodes that the other won and it did not.';

create view v_critic_steps as
with children as (
    select tree_id, parent, sum(visits) as visits, sum(value_sum) as value_sum from node where parent >= 0 group by all
), judged as (
    select distinct p.iteration_id, p.tree_id, v.node_index, v.verdict
    from verdict v join pair p using (pair_id) where v.node_index is not null
), valued as (
    select j.*, n.depth, n.action, n.visits, n.value_sum / nullif(n.visits, 0) as value,
        (c.value_sum - n.value_sum) / nullif(c.visits - n.visits, 0) as sibling_value
    from judged j
    join node n on (n.tree_id, n.node_index) = (j.tree_id, j.node_index)
    join children c on (c.tree_id, c.parent) = (n.tree_id, n.parent)
)
select r.recipe, i.run_id, i.iteration, t.instance_id, v.tree_id, v.node_index, v.depth, v.action, v.verdict, o.verdict as oracle,
    v.visits, v.value, v.sibling_value, v.sibling_value - v.value as value_drop
from valued v
join tree t using (tree_id)
join iteration i on i.iteration_id = v.iteration_id
join run r using (run_id)
left join oracle_verdict o on (o.tree_id, o.node_index) = (v.tree_id, v.node_index)
order by r.started_at, i.run_id, i.iteration, v.tree_id, v.node_index;
comment on view v_critic_steps is 'Each judged step with what the tree itself says of it: how much less it is worth than its siblings.';
comment on column v_critic_steps.sibling_value is 'Mean of the rewards backed up through the other children of its parent; null where none was visited.';
comment on column v_critic_steps.value_drop is 'sibling_value - value: what was lost by this step and not another.';
comment on column v_critic_steps.oracle is 'The true verdict; null where the environment knows none, or no report has asked for it.';

create view v_critic_audit as
with recursive children as (
    select tree_id, parent, sum(visits) as visits, sum(value_sum) as value_sum from node where parent >= 0 group by all
), seen as (
    select pair_id, min(position) as first_seen from verdict group by pair_id
), path as (
    select p.pair_id, n.tree_id, n.node_index, n.parent, n.depth, n.visits, n.value_sum
    from pair p semi join critique c on c.pair_id = p.pair_id
    join node n on (n.tree_id, n.node_index) = (p.tree_id, p.bad_leaf)
    union all
    select p.pair_id, n.tree_id, n.node_index, n.parent, n.depth, n.visits, n.value_sum
    from path p join node n on (n.tree_id, n.node_index) = (p.tree_id, p.parent)
), steps as (
    select p.pair_id, p.depth - 1 as position, o.verdict as oracle,
        (c.value_sum - p.value_sum) / nullif(c.visits - p.visits, 0) - p.value_sum / nullif(p.visits, 0) as value_drop
    from path p
    join seen s using (pair_id)
    join children c on (c.tree_id, c.parent) = (p.tree_id, p.parent)
    left join oracle_verdict o on (o.tree_id, o.node_index) = (p.tree_id, p.node_index)
    where p.depth - 1 >= s.first_seen
), found as (
    select pair_id, count(*) as steps, arg_max(position, (value_drop, -position)) filter (value_drop > 0) as tree_error,
        max(value_drop) filter (value_drop > 0) as value_drop, min(position) filter (oracle = 'bad') as oracle_error,
        count(oracle) > 0 as has_oracle
    from steps group by pair_id
)
select r.recipe, i.run_id, i.iteration, p.pair_id, p.tree_id, t.instance_id, x.depth, f.steps, p.shared_steps, c.first_error as judge_error,
    f.tree_error, f.value_drop, f.oracle_error, f.has_oracle, c.first_error - f.tree_error as judge_after_tree,
    c.first_error - f.oracle_error as judge_after_oracle, f.tree_error - f.oracle_error as tree_after_oracle
from found f
join pair p using (pair_id)
join critique c using (pair_id)
join tree t on t.tree_id = p.tree_id
join iteration i on i.iteration_id = p.iteration_id
join run r using (run_id)
left join instance x on x.instance_id = t.instance_id
order by r.started_at, i.run_id, i.iteration, p.tree_id, p.position;
comment on view v_critic_audit is 'The first error of each judged path by three witnesses: the judge, the tree''s own values, and the environment where it knows the truth.';
comment on column v_critic_audit.depth is 'Difficulty class of the instance.';
comment on column v_critic_audit.steps is 'Steps of the bad path from the first one that the judge saw; all three look at these alone.';
comment on column v_critic_audit.judge_error is 'Position of the first step that the judge calls bad, from 0; null where there is none. So the others.';
comment on column v_critic_audit.tree_error is 'Position of the step that is worth least beside its siblings; null where no step is worth less than they are.';
comment on column v_critic_audit.value_drop is 'How much less that is: the siblings'' mean reward minus its own.';
comment on column v_critic_audit.judge_after_tree is 'Steps by which the judge sees it later; negative: earlier. So the others.';
