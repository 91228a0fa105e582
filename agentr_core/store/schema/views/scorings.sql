-- Stored episodes as another scoring sees them.

-- In no order: v_scorings and the viewer's list would sort it for nothing, which takes half of their time.
create view v_regrades as
with graded as (
    select g.scoring_id, g.reward as new_reward, g.success as new_success, g.answer.text as reply, g.created_at, t.reward,
        t.success, coalesce(t.iteration_id, e.iteration_id) as iteration_id, coalesce(e.name, t.source) as episodes_of,
        t.instance_id, t.trajectory_id, t.tree_id, t.leaf
    from trajectory t
    join regrade g on g.trajectory_id = coalesce(t.copied_from, t.trajectory_id)
    left join evaluation e using (evaluation_id)
    union all
    select g.scoring_id, g.reward, g.success, g.answer.text, g.created_at, g.old_reward, g.old_success, t.iteration_id, 'tree',
        t.instance_id, p.trajectory_id, t.tree_id, g.leaf
    from tree t
    join leaf_regrade g on g.tree_id = coalesce(t.copied_from, t.tree_id)
    left join trajectory p on p.source = 'tree' and p.tree_id = t.tree_id and p.leaf = g.leaf
)
select g.scoring_id, s.grader, i.run_id, i.iteration, g.episodes_of, g.instance_id, g.success::integer as success,
    g.new_success::integer as new_success, g.reward, g.new_reward,
    case when g.new_reward is null then 'unreadable'
        when g.new_success <> g.success then if(g.new_success, 'won', 'lost')
        when g.new_reward > g.reward + 1e-9 then 'up'
        when g.new_reward < g.reward - 1e-9 then 'down'
        else 'same' end as change,
    g.reply, g.trajectory_id, g.tree_id, g.leaf, g.created_at
from graded g
join scoring s using (scoring_id)
left join iteration i using (iteration_id);
comment on view v_regrades is 'Episodes and paths of search trees that were scored again: the reward that they were played with, and the new one.';
comment on column v_regrades.episodes_of is 'The name of the evaluation, or what the episode was played for: rollout, expert and so on; tree: a path from the root of a tree to a leaf.';
comment on column v_regrades.trajectory_id is 'Null of a path of a tree that became no sample.';
comment on column v_regrades.leaf is 'node.node_index of the last step of such a path.';
comment on column v_regrades.change is 'won or lost: the success has changed; up or down: only the reward has; same; unreadable: the reply of the model that was asked gives no grade.';
comment on column v_regrades.reply is 'What the model said that was asked, if one was.';

create view v_scorings as
select r.scoring_id, r.grader, r.run_id, r.iteration, r.episodes_of, count(*) as episodes,
    avg(r.success) filter (r.change <> 'unreadable') as success, avg(r.new_success) as new_success,
    avg(r.reward) filter (r.change <> 'unreadable') as reward, avg(r.new_reward) as new_reward,
    count(*) filter (r.change = 'won') as won, count(*) filter (r.change = 'lost') as lost,
    count(*) filter (r.new_reward > r.reward + 1e-9) as up, count(*) filter (r.new_reward < r.reward - 1e-9) as down,
    count(*) filter (r.change = 'unreadable') as unreadable
from v_regrades r
group by r.scoring_id, r.grader, r.run_id, r.iteration, r.episodes_of
order by r.run_id, r.scoring_id, r.iteration, r.episodes_of;
comment on view v_scorings is 'Each scoring beside the one that the episodes were played with, by run, iteration and what they were played for.';
comment on column v_scorings.success is 'Share of the episodes that were won as they were played, without those whose new grade is unreadable.';
comment on column v_scorings.reward is 'Mean reward of these, as they were played.';
comment on column v_scorings.won is 'Episodes that were lost as they were played, and are won now; `lost` the other way round.';
comment on column v_scorings.up is 'Episodes whose reward is higher than it was, those that are won now included; `down` likewise.';
comment on column v_scorings.unreadable is 'Episodes without a new grade, since the reply of the model that was asked could not be read.';
