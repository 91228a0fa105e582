-- Assistant turns that were grown by continuation.

create table message_span (
    sample_id varchar not null,
    message integer not null,
    position integer not null,
    text_id varchar not null,
    train boolean not null,
    token_ids integer[],
    finish_reason varchar,
    tokenizer varchar,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (sample_id, message, position)
);
comment on table message_span is 'A part of an assistant turn that was grown by continuation: a reply, or what came of it; the text of the turn is the texts of its spans, joined.';
comment on column message_span.message is 'Position of the turn in its sample.';
comment on column message_span.position is 'Place of the span in its turn, from 0.';
comment on column message_span.train is 'Whether the tokens of the span carry loss; the flag of the turn says whether one of its spans does.';
comment on column message_span.token_ids is 'The tokens as they were sampled; null for a span that was not sampled.';
