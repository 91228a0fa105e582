-- Episodes that were scored again, by another grader than the one they were played with.

create table scoring (
    scoring_id varchar primary key,
    grader varchar not null,
    settings json not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table scoring is 'A way of scoring stored episodes again, with `agentr regrade`. The episodes keep the rewards that they were played with.';
comment on column scoring.scoring_id is 'Hash of the grader and its settings: what was scored with it, in any run, is not scored again.';
comment on column scoring.grader is 'world, exact, numeric, regex, command or rubric.';
comment on column scoring.settings is 'What determines its rewards: its options, hashes of the files that it reads, the model that it asks; of a world, name, options and version.';

create table regrade (
    scoring_id varchar not null,
    trajectory_id varchar not null,
    reward double,
    success boolean,
    answer struct("role" varchar, model varchar, prompt_hash varchar, seed bigint, "text" varchar, finish_reason varchar, prompt_tokens bigint, completion_tokens bigint, thinks boolean),
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (scoring_id, trajectory_id)
);
comment on table regrade is 'The reward that a scoring gives an episode. v_regrades has the old one beside it.';
comment on column regrade.trajectory_id is 'The episode; of one that was copied from another run, the original.';
comment on column regrade.reward is 'Null where the reply of the model that was asked could not be read.';
comment on column regrade.success is 'Null where reward is.';
comment on column regrade.answer is 'The whole reply of the model that was asked; null where a rule decided.';
