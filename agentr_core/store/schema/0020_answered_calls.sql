-- Answers of tools that later calls may use, in this run and in others.

create table answered_call (
    call_id varchar primary key,
    tool varchar not null,
    provider varchar not null,
    parameters json not null,
    key varchar not null,
    status varchar not null,
    milliseconds double not null,
    output_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table answered_call is 'What a tool answered, for later calls that ask the same; a failure is not among them. tool_call has the calls of each step.';
comment on column answered_call.call_id is 'Hash of tool, provider, parameters and key.';
comment on column answered_call.parameters is 'What decides the answer beside the key: how many documents, of which corpus.';
comment on column answered_call.key is 'What was asked for in normal form.';
comment on column answered_call.status is 'ok, or empty: the tool found nothing.';
comment on column answered_call.milliseconds is 'How long the provider took.';
comment on column answered_call.output_id is 'The output as the tool gave it.';
