-- Where a teacher collects, the replies are its own, as in the bill of a report.

create or replace view v_tokens as
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
), asked as (
    select i.run_id, i.iteration, s.* exclude (iteration_id)
        replace (if(s.purpose = 'collected' and i.collected_by is not null, 'teacher', s.role) as role)
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
