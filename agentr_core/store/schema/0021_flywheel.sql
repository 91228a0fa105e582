-- The flywheel of ET-Agent: families of trajectories, and what editors and reflectors were asked for them.

alter table derivation add column round integer;
comment on column derivation.round is 'The round of a flywheel in which it was made; null where there are no rounds.';

create table family (
    family_id varchar primary key,
    iteration_id varchar not null,
    instance_id varchar not null,
    checkpoint_id varchar not null,
    members integer not null,
    rounds integer not null,
    ended_by varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table family is 'A question whose flywheel is at its end; its trajectories have source flywheel.';
comment on column family.checkpoint_id is 'The policy.';
comment on column family.rounds is 'How many rounds there were.';
comment on column family.ended_by is 'rounds: all that were wanted; members: no room for more; tokens: the limit of what models write; no-child: a round made none.';

create table edit (
    edit_id varchar primary key,
    iteration_id varchar not null,
    instance_id varchar not null,
    subject varchar not null,
    prompt varchar not null,
    role varchar not null,
    model varchar not null,
    prompt_hash varchar not null,
    seed bigint not null,
    reply_id varchar not null,
    finish_reason varchar not null,
    prompt_tokens integer not null,
    completion_tokens integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table edit is 'What a model was asked about a trajectory in order to make another one of it, and said.';
comment on column edit.prompt is 'Name of the prompt with a hash of its words.';
comment on column edit.role is 'The role of the model: editor, reflector.';
comment on column edit.prompt_hash is 'Hash of the messages.';
