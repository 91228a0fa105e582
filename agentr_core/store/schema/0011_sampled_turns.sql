-- How a sampled turn of a sample ended: one that the token limit cut is not trained to end there.

alter table message add column finish_reason varchar;
comment on column message.finish_reason is 'stop or length (cut by the token limit); null for a turn that was not sampled, and where it is not known, as in samples of earlier versions.';
comment on column generation.finish_reason is 'stop or length (cut by the token limit); null where it is not known.';
