-- The key of the state of the world that a step was taken in, for credit by state (`grpo.credit: states`).
-- Both columns get a new type, for the reason that 0112 gives.

alter table trajectory alter column steps set data type struct(
    reply varchar, "action" varchar, observation varchar, reward double, "matched" varchar, "valid" boolean, terminated boolean,
    success boolean, disaster boolean, token_ids bigint[], logprobs double[], finish_reason varchar, tokenizer varchar,
    dropped bigint,
    tool_calls struct(
        tool varchar, provider varchar, parameters varchar, "key" varchar, status varchar, "milliseconds" double, cached boolean,
        output varchar
    )[],
    answers struct(
        "role" varchar, model varchar, prompt_hash varchar, seed bigint, "text" varchar, finish_reason varchar,
        prompt_tokens bigint, completion_tokens bigint, thinks boolean
    )[],
    summary_of bigint, state_key varchar
)[];
alter table node alter column step set data type struct(
    reply varchar, "action" varchar, observation varchar, reward double, "matched" varchar, "valid" boolean, terminated boolean,
    success boolean, disaster boolean, token_ids bigint[], logprobs double[], finish_reason varchar, tokenizer varchar,
    dropped bigint,
    tool_calls struct(
        tool varchar, provider varchar, parameters varchar, "key" varchar, status varchar, "milliseconds" double, cached boolean,
        output varchar
    )[],
    answers struct(
        "role" varchar, model varchar, prompt_hash varchar, seed bigint, "text" varchar, finish_reason varchar,
        prompt_tokens bigint, completion_tokens bigint, thinks boolean
    )[],
    summary_of bigint, state_key varchar
);

comment on table rl_credit is 'The advantage of a step of a rollout, where steps have their own (`grpo.credit`); else it is that of rl_rollout.';
comment on column rl_group.contrast is 'Whether what its episodes are worth differs, or with credit for steps any of them has an advantage; only such groups are trained on.';
alter table rl_step add column compared_share double;
alter table rl_step add column praised_unhelpful double;
alter table rl_step add column punished_helpful double;
alter table rl_step add column state_conflicts double;
comment on column rl_step.compared_share is 'Share of the sampled steps in whose state another step of their group was sampled; null, as what follows, where states are not known.';
comment on column rl_step.praised_unhelpful is 'Of the steps with a positive advantage, the share of those that were not the first of a shortest way to a reward that their group found.';
comment on column rl_step.punished_helpful is 'Of the steps with a negative advantage, the share of those that were.';
comment on column rl_step.state_conflicts is 'Of the actions that were taken again in a state, the share of those that led to another state than before: of errors in the keys of states.';
