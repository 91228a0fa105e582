-- How a sampled turn of a sample ended (one that the token limit cut is not trained to end there), and whose token ids it has.

alter table message add column finish_reason varchar;
comment on column message.finish_reason is 'stop or length (cut by the token limit); null for a turn that was not sampled, and where it is not known, as in samples of earlier versions.';
comment on column generation.finish_reason is 'stop or length (cut by the token limit); null where it is not known.';

alter table generation add column tokenizer varchar;
comment on column generation.tokenizer is 'Fingerprint of the tokenizer (vocabulary, special tokens, chat template) whose ids token_ids are; null where the backend does not know it, and in rows of earlier versions: then it is that of the model of the run.';
alter table message add column tokenizer varchar;
comment on column message.tokenizer is 'As generation.tokenizer.';
