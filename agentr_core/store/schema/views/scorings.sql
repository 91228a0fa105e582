-- Stored episodes as another scoring sees them.

create view score_pair as
select g.scoring_id, coalesce(t.iteration_id, e.iteration_id) as iteration_id, coalesce(e.name, t.source) as episodes_of,
    t.instance_id, t.trajectory_id, t.tree_id, t.leaf, t.success::integer as success, g.success::integer as new_success,
    t.reward, g.reward as new_reward, g.answer.text as reply, g.created_at
from trajectory t
join regrade g on g.trajectory_id = coalesce(t.copied_from, t.trajectory_id)
left join evaluation e using (evaluation_id)
union all
select g.scoring_id, t.iteration_id, 'tree', t.instance_id, null, t.tree_id, g.leaf, g.old_success::integer,
    g.success::integer, g.old_reward, g.reward, g.answer.text, g.created_at
from tree t
join leaf_regrade g on g.tree_id = coalesce(t.copied_from, t.tree_id);
comment on view score_pair is 'Old and new score of each episode and path that was scored again; v_regrades has run, change and sample beside them.';

-- In no order: the viewer's list would sort it for nothing, which takes half of its time.
create view v_regrades as
select g.scoring_id, s.grader, i.run_id, i.iteration, g.episodes_of, g.instance_id, g.success, g.new_success, g.reward,
    g.new_reward,
    case when g.new_reward is null then 'unreadable'
        when g.new_success <> g.success then if(g.new_success = 1, 'won', 'lost')
        when g.new_reward > g.reward + 1e-9 then 'up'
        when g.new_reward < g.reward - 1e-9 then 'down'
        else 'same' end as change,
    g.reply, coalesce(g.trajectory_id, p.trajectory_id) as trajectory_id, g.tree_id, g.leaf, g.created_at
from score_pair g
join scoring s using (scoring_id)
left join iteration i using (iteration_id)
left join trajectory p
    on g.trajectory_id is null and p.source = 'tree' and p.tree_id = g.tree_id and p.leaf = g.leaf;
comment on view v_regrades is 'Episodes and paths of search trees that were scored again: the reward that they were played with, and the new one.';
comment on column v_regrades.episodes_of is 'The name of the evaluation, or what the episode was played for: rollout, expert and so on; tree: a path from the root of a tree to a leaf.';
comment on column v_regrades.trajectory_id is 'Null of a path of a tree that became no sample.';
comment on column v_regrades.leaf is 'node.node_index of the last step of such a path.';
comment on column v_regrades.change is 'won or lost: the success has changed; up or down: only the reward has; same; unreadable: the reply of the model that was asked gives no grade.';
comment on column v_regrades.reply is 'What the model said that was asked, if one was.';

-- Counted before runs are joined: a scoring of search trees has hundreds of thousands of paths, and few lines.
create view v_scorings as
with counts as (
    select scoring_id, iteration_id, episodes_of, count(*) as episodes,
        avg(success) filter (new_reward is not null) as success, avg(new_success) as new_success,
        avg(reward) filter (new_reward is not null) as reward, avg(new_reward) as new_reward,
        count(*) filter (new_success > success) as won, count(*) filter (new_success < success) as lost,
        count(*) filter (new_reward > reward + 1e-9) as up, count(*) filter (new_reward < reward - 1e-9) as down,
        count(*) filter (new_reward is null) as unreadable
    from score_pair
    group by scoring_id, iteration_id, episodes_of
)
select c.scoring_id, s.grader, i.run_id, i.iteration, c.episodes_of, c.episodes, c.success, c.new_success, c.reward,
    c.new_reward, c.won, c.lost, c.up, c.down, c.unreadable
from counts c
join scoring s using (scoring_id)
left join iteration i using (iteration_id)
order by i.run_id, c.scoring_id, i.iteration, c.episodes_of;
comment on view v_scorings is 'Each scoring beside the one that the episodes were played with, by run, iteration and what they were played for.';
comment on column v_scorings.success is 'Share of the episodes that were won as they were played, without those whose new grade is unreadable.';
comment on column v_scorings.reward is 'Mean reward of these, as they were played.';
comment on column v_scorings.won is 'Episodes that were lost as they were played, and are won now; `lost` the other way round.';
comment on column v_scorings.up is 'Episodes whose reward is higher than it was, those that are won now included; `down` likewise.';
comment on column v_scorings.unreadable is 'Episodes without a new grade, since the reply of the model that was asked could not be read.';
