-- The revision tests of two runs may go on from different failures of the same instance: episodes are the same where the steps
-- that they were given are, too.

create or replace view v_comparisons as
with given as (
    select p.trajectory_id, list(s.reply_id order by s.position) as replies
    from (select distinct trajectory_id, cut from episode where cut > 0) p
    join step s on s.trajectory_id = p.trajectory_id and s.position < p.cut
    group by p.trajectory_id
), played as (
    select i.run_id, i.iteration, e.name as evaluation, e.split, p.instance_id, p.repeat, p.cut, coalesce(g.replies, []) as given,
        t.success, t.reward
    from episode p
    join evaluation e using (evaluation_id)
    join trajectory t using (trajectory_id)
    join iteration i on i.iteration_id = e.iteration_id
    left join given g using (trajectory_id)
)
select a.run_id, a.iteration, b.run_id as other_run_id, b.iteration as other_iteration, a.evaluation, a.split, count(*) as episodes,
    avg(a.success::integer) as success, avg(b.success::integer) as other_success,
    avg(a.success::integer - b.success::integer) as gain, count(*) filter (a.success and not b.success) as won,
    count(*) filter (b.success and not a.success) as lost, avg(a.reward - b.reward) as reward_gain
from played a
join played b using (evaluation, split, instance_id, repeat, cut, given)
where (a.run_id, a.iteration) <> (b.run_id, b.iteration)
group by a.run_id, a.iteration, b.run_id, b.iteration, a.evaluation, a.split;
comment on view v_comparisons is 'Each two models that played the same episodes of a set, side by side; `agentr report RUN RUN` has the intervals.';
comment on column v_comparisons.episodes is 'Episodes that both played: same instance and number and, in a revision test, the same replayed steps.';
comment on column v_comparisons.gain is 'success - other_success.';
comment on column v_comparisons.won is 'Episodes that it won and the other did not.';
comment on column v_comparisons.lost is 'Episodes that the other won and it did not.';
