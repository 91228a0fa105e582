-- Trees and trajectories with their texts, what judges say of them, and what models and tools did for them.

-- Success is a number in all views: DuckDB has no mean of a BOOLEAN. `where success` and `filter (success)` take it as it is;
-- `max(success)` and `min(success)` stand for bool_or and bool_and.
-- The goal is found as `texts.goal` finds it; a test compares the two.
create view v_trajectories as
select r.recipe, i.run_id, i.iteration, t.source, e.name as evaluation,
    if(t.source = 'rollout', coalesce(r.continued_by, c.path), c.path) as model, n.environment, n.split, t.instance_id,
    n.instance_index, n.depth, f.facts, trim(regexp_replace(split_part(coalesce(
        nullif(regexp_extract(t.opening, '(?i)\b(?:(?:goal|task|instruction|question)(?: is)?(?: to)?:|your (?:goal|task) is to\b)\s*(?:\[SEP\]\s*)?(\S[^\n]*)', 1), ''),
        regexp_extract(t.opening, '\S[^\n]*')), ' [SEP]', 1), '\s+', ' ', 'g')) as goal,
    t.success::integer as success, t.reward, t.stop as stop_reason, t.num_steps, t.first_observation, t.trajectory_id, t.iteration_id,
    t.evaluation_id, t.tree_id, c.checkpoint_id, t.created_at
from (
    -- An outside agent begins with several turns, of which the goal stands in the user's.
    select *, case
        when starts_with(first_observation, '[{"role": ') and json_valid(first_observation) then coalesce(nullif(array_to_string(
            [turn.content for turn in from_json(first_observation, '[{"role": "VARCHAR", "content": "VARCHAR"}]') if turn.role = 'user'],
            chr(10)), ''), first_observation)
        else first_observation end as opening
    from trajectory
) t
left join instance n using (instance_id)
left join instance_facts f using (instance_id)
left join evaluation e using (evaluation_id)
left join tree g using (tree_id)
left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
left join (
    -- Who goes on from the errors of the policy, where that is the teacher.
    select run_id, recipe, started_at, case when (config->>'$.splice.continuation.by') = 'teacher' then
        if((config->>'$.models.teacher.backend') = 'openai', config->>'$.models.teacher.server.model', config->>'$.models.teacher.path')
        end as continued_by
    from run
) r using (run_id)
left join checkpoint c
    on t.source <> 'expert' and not (t.source = 'rollout' and r.continued_by is not null) and c.checkpoint_id = coalesce(e.checkpoint_id, g.checkpoint_id, i.collected_by, i.checkpoint_in)
where t.source not in ('bare', 'ungraded')
order by r.started_at, i.run_id, i.iteration, t.source, e.name, t.instance_id, t.trajectory_id;
comment on view v_trajectories is 'All episodes and paths, of evaluations, trees, rollouts and experts alike: what was to be reached, by which model, and how it ended. Left out are those that wait for their grade or their thoughts.';
comment on column v_trajectories.source is 'As trajectory.source.';
comment on column v_trajectories.iteration is 'The one that it was played for; of an evaluation, the one that made the model. 0: the model that the run begins with.';
comment on column v_trajectories.evaluation is 'The held-out set; null of what was played to train on.';
comment on column v_trajectories.model is 'Directory of the model that played it, or its name on a server; in group RL, of the one that the iteration begins with. Null of an expert''s.';
comment on column v_trajectories.checkpoint_id is 'Of that model; null where the teacher goes on from an error of the policy, too.';
comment on column v_trajectories.depth is 'Difficulty class, where the environment has one.';
comment on column v_trajectories.facts is 'What the world tells of the instance, as in table instance_facts: `facts->>''$.task''`.';
comment on column v_trajectories.goal is 'What is to be reached, out of first_observation: what follows the label of a goal, task, instruction or question, else the first line.';
comment on column v_trajectories.success is '1 or 0, so that its mean is the rate; `where success` works, too.';
comment on column v_trajectories.stop_reason is 'As trajectory.stop.';

create view v_nodes as
select n.tree_id, t.instance_id, t.iteration_id, n.node_index, n.parent, n.depth, n.step.reply as reply, n.step.action as action,
    n.step.matched as matched, n.step.valid as valid, coalesce(n.step.observation, t.first_observation) as observation,
    n.step.reward as reward, n.step.terminated as terminated, n.step.success::integer as success, n.step.disaster as disaster, n.visits, n.value_sum / nullif(n.visits, 0) as value, n.terminal, n.stop,
    n.dive, n.duplicates, n.step.state_key as state_key, n.asked.seed as seed, n.asked.prompt_tokens as prompt_tokens,
    coalesce(n.asked.completion_tokens, nullif(len(n.step.token_ids), 0)) as completion_tokens, n.created_at
from node n
join tree t using (tree_id);
comment on view v_nodes is 'The nodes of all trees with their texts; the observation of a root is the first one.';
comment on column v_nodes.success is 'As in v_trajectories; null of a root.';
comment on column v_nodes.state_key is 'As step.state_key: of the state that the action was taken in, which is that of the parent.';

create view v_steps as
select s.trajectory_id, t.source, t.instance_id, t.iteration_id, t.evaluation_id, s.position, s.reply, s.action, s.matched, s.valid,
    s.observation, s.reward, s.terminated, s.success::integer as success, s.disaster, s.asked.seed as seed, s.asked.prompt_tokens as prompt_tokens,
    coalesce(s.asked.completion_tokens, nullif(len(s.token_ids), 0)) as completion_tokens, s.summary_of, s.state_key
from step s
join trajectory t using (trajectory_id)
order by s.trajectory_id, s.position;
comment on view v_steps is 'The steps of all trajectories with their texts.';
comment on column v_steps.success is '1 of the step that won, else 0.';
comment on column v_steps.summary_of is 'As step.summary_of.';
comment on column v_steps.state_key is 'As step.state_key.';

create view v_critic_steps as
with children as (
    select tree_id, parent, sum(visits) as visits, sum(value_sum) as value_sum from node where parent >= 0 group by all
), judged as (
    select distinct p.iteration_id, p.tree_id, v.node_index, v.verdict
    from verdict v join pair p using (pair_id) where v.node_index is not null
), valued as (
    select j.*, n.depth, n.step.action as action, n.visits, n.value_sum / nullif(n.visits, 0) as value,
        (c.value_sum - n.value_sum) / nullif(c.visits - n.visits, 0) as sibling_value
    from judged j
    join node n on (n.tree_id, n.node_index) = (j.tree_id, j.node_index)
    join children c on (c.tree_id, c.parent) = (n.tree_id, n.parent)
)
select r.recipe, i.run_id, i.iteration, t.instance_id, v.tree_id, v.node_index, v.depth, v.action, v.verdict, o.verdict as oracle,
    v.visits, v.value, v.sibling_value,
    -- The last digits of a sum are no difference.
    if(abs(v.sibling_value - v.value) < 1e-9, 0, v.sibling_value - v.value) as value_drop
from valued v
join tree t using (tree_id)
join iteration i on i.iteration_id = v.iteration_id
join run r using (run_id)
left join oracle_verdict o on (o.tree_id, o.node_index) = (v.tree_id, v.node_index)
order by r.started_at, i.run_id, i.iteration, v.tree_id, v.node_index;
comment on view v_critic_steps is 'Each judged step with what the tree itself says of it: how much less it is worth than its siblings.';
comment on column v_critic_steps.sibling_value is 'Mean of the rewards backed up through the other children of its parent; null where none was visited.';
comment on column v_critic_steps.value_drop is 'sibling_value - value: what was lost by this step and not another.';
comment on column v_critic_steps.oracle is 'The true verdict; null where the environment knows none, or has not been asked yet.';

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
    -- Up to the last digits of a sum, in which equal means may differ.
    select pair_id, count(*) as steps,
        arg_max(position, (round(value_drop, 9), -position)) filter (value_drop > 1e-9) as tree_error,
        max(value_drop) filter (value_drop > 1e-9) as value_drop, min(position) filter (oracle = 'bad') as oracle_error,
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

create view v_families as
select r.recipe, i.run_id, i.iteration, t.instance_id, t.trajectory_id, d.parent_id, d.round, coalesce(d.operator, 'fresh') as operator,
    d.position, t.success::integer as success, t.reward, t.num_steps,
    coalesce(list_sum([len(step.tool_calls) for step in t.steps]), 0)::bigint as calls,
    coalesce(list_sum([len(step.tool_calls) for step in t.steps[t.given + 1:]]), 0)::bigint as calls_made,
    s.sample_id is not null as is_sample
from trajectory t
join iteration i using (iteration_id)
join run r using (run_id)
left join derivation d on d.child_id = t.trajectory_id
left join (select trajectory_id, min(sample_id) as sample_id from sample group by all) s on s.trajectory_id = t.trajectory_id
where t.source = 'flywheel'
order by r.started_at, i.run_id, i.iteration, t.instance_id, d.round nulls first, d.operator;
comment on view v_families is 'The trajectories of a flywheel: who was made of whom, in which round and by which operator.';
comment on column v_families.success is 'As in v_trajectories.';
comment on column v_families.operator is 'fresh: before the first round; else the operator.';
comment on column v_families.calls is 'Calls of tools in its steps, those that it took over from its parent among them: what the trajectory costs.';
comment on column v_families.calls_made is 'Calls that were made for it.';
comment on column v_families.is_sample is 'Whether it is fit to be trained on.';

create view v_tool_calls as
with made as (
    select t.iteration_id, t.source, c.* from tool_call c join trajectory t on t.trajectory_id = c.owner_id
    where c.kind = 'step' and not c.given and t.copied_from is null and t.source not in ('tree', 'ungraded')
    union all
    select t.iteration_id, 'tree', c.* from tool_call c join tree t on t.tree_id = c.owner_id where c.kind = 'node' and t.copied_from is null
)
select r.recipe, i.run_id, i.iteration, m.source, m.tool, m.provider, m.status, count(*) as calls, count(*) filter (m.cached) as cached,
    sum(m.milliseconds) / 1000 as seconds
from made m
join iteration i using (iteration_id)
join run r using (run_id)
group by all
order by min(r.started_at), i.run_id, i.iteration, m.source, m.tool, m.provider, m.status;
comment on view v_tool_calls is 'Calls of tools that were made, by what for and how they ended; those that a trajectory took over with its beginning, and copies of another run''s, are left out.';
comment on column v_tool_calls.source is 'tree: in a search; else that of the trajectory: episode, rollout, flywheel and so on.';
comment on column v_tool_calls.cached is 'How many of them an earlier call had the answer for.';
comment on column v_tool_calls.seconds is 'How long the calls took, one after the other.';

create view v_tokens as
with spent as (
    select t.iteration_id, 'tree' as source, 'collected' as purpose, 'actor' as role, g.prompt_tokens, g.completion_tokens, g.finish_reason
    from generation g join tree t on t.tree_id = g.owner_id where g.kind = 'node' and t.copied_from is null
    union all
    select j.iteration_id, 'tree', 'judged', 'judge', g.prompt_tokens, g.completion_tokens, g.finish_reason
    from generation g join judgement j on (j.tree_id, j.node_index) = (g.owner_id, g.position)
    where g.kind = 'judgement' and j.copied_from is null
    union all
    select t.iteration_id, t.source, if(t.source in ('episode', 'validation'), 'evaluated', 'collected'), 'actor', g.prompt_tokens,
        g.completion_tokens, g.finish_reason
    from generation g join trajectory t on t.trajectory_id = g.owner_id
    where g.kind = 'step' and g.seed is not null and t.copied_from is null
        and t.source in ('episode', 'rollout', 'validation', 'flywheel')
    union all
    select coalesce(t.iteration_id, s.iteration_id), coalesce(s.source, 'tree'), a.purpose, a.role, a.prompt_tokens, a.completion_tokens, a.finish_reason
    from answer a
    left join tree t on a.kind = 'node' and t.tree_id = a.owner_id
    left join trajectory s on a.kind = 'step' and s.trajectory_id = a.owner_id
    where not a.given and coalesce(t.copied_from, s.copied_from) is null and coalesce(s.source, '') not in ('tree', 'ungraded')
    union all
    select iteration_id, null, 'edited', role, prompt_tokens, completion_tokens, finish_reason from edit
), asked as (
    select i.run_id, i.iteration, s.* exclude (iteration_id, source) replace (if(
        s.purpose = 'collected' and (i.collected_by is not null or (s.source = 'rollout' and i.run_id in (
            select run_id from run where (config->>'$.splice.continuation.by') = 'teacher'
        ))), 'teacher', s.role) as role)
    from spent s join iteration i using (iteration_id)
)
select r.recipe, s.run_id, s.iteration, s.purpose, s.role, count(*) as replies, coalesce(sum(s.prompt_tokens), 0)::bigint as prompt_tokens,
    coalesce(sum(s.completion_tokens), 0)::bigint as completion_tokens, count(*) filter (s.finish_reason = 'length') as cut
from asked s
join run r using (run_id)
group by all
order by min(r.started_at), s.run_id, s.iteration, s.purpose, s.role;
comment on view v_tokens is 'Tokens that models read and wrote, by iteration, purpose and role; copies of another run''s replies are left out.';
comment on column v_tokens.purpose is 'collected, judged, evaluated or edited; step, grade and other purposes of table answer: asked on the side of an episode.';
comment on column v_tokens.role is 'Whose model replied; what a teacher collects is the teacher''s.';
comment on column v_tokens.prompt_tokens is 'A prompt counts once for each of its replies.';
comment on column v_tokens.cut is 'Replies that their token limit cut, of those for which this is known.';
