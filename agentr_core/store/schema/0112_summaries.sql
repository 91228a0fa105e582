-- Steps that are summaries of a history that filled the context (`context: summary`).
-- Both columns get a new type, whose fields take their values by name. The shorter statement for a field within a record is not
-- safe in filled stores: there it ended the process with a memory fault (DuckDB 1.5.6).

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
    summary_of bigint
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
    summary_of bigint
);
