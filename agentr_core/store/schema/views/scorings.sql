-- Stored episodes as another scoring sees them.

create view v_regrades as
select g.scoring_id, s.grader, i.run_id, i.iteration, coalesce(e.name, t.source) as episodes_of, t.instance_id,
    t.success::integer as success, g.success::integer as new_success, t.reward, g.reward as new_reward,
    case when g.reward is null then 'unreadable'
        when g.success <> t.success then if(g.success, 'won', 'lost')
        when g.reward > t.reward + 1e-9 then 'up'
        when g.reward < t.reward - 1e-9 then 'down'
        else 'same' end as change,
    g.answer.text as reply, t.trajectory_id, g.created_at
from trajectory t
join regrade g on g.trajectory_id = coalesce(t.copied_from, t.trajectory_id)
join scoring s using (scoring_id)
left join evaluation e using (evaluation_id)
left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
order by s.created_at, g.scoring_id, i.run_id, i.iteration, episodes_of, t.instance_id, t.trajectory_id;
comment on view v_regrades is 'Episodes that were scored again: the reward that they were played with, and the new one.';
comment on column v_regrades.episodes_of is 'The name of the evaluation, or what the episode was played for: rollout, expert and so on.';
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
