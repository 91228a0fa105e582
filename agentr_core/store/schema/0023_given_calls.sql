-- Calls and answers of steps that a trajectory goes on from: they were made when the steps were recorded, and not again.

alter table tool_call add column given boolean default false;
comment on column tool_call.given is 'Whether its step was recorded before and is what the trajectory goes on from: the call was not made again.';
alter table answer add column given boolean default false;
comment on column answer.given is 'Whether its step was recorded before and is what the trajectory goes on from: nobody was asked again.';

update tool_call set given = true from derivation d where tool_call.kind = 'step' and tool_call.owner_id = d.child_id and tool_call.position < d.position;
update answer set given = true from derivation d
where answer.kind = 'step' and answer.purpose = 'step' and answer.owner_id = d.child_id and answer.position < d.position;
