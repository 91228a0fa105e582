-- Rooms for methods to come: what was derived from what, what tools were called, what models were asked on the side, and
-- rewards that are given after an episode. Where a trajectory comes from is an open list.

alter table trajectory rename to trajectory_0014;
create table trajectory (
    trajectory_id varchar primary key,
    source varchar not null,
    iteration_id varchar,
    evaluation_id varchar,
    instance_id varchar not null,
    first_observation_id varchar not null,
    reward double not null,
    success boolean not null,
    stop varchar not null,
    num_steps integer not null,
    tree_id varchar,
    leaf integer,
    created_at timestamp not null default (now() at time zone 'UTC'),
    copied_from varchar
);
insert into trajectory by name select * from trajectory_0014;
drop table trajectory_0014;
comment on table trajectory is 'The steps of one episode with its final reward. v_steps shows the steps with their texts.';
comment on column trajectory.success is 'The success flag of the environment, or of the grader.';
comment on column trajectory.stop is 'success, failure, disaster, step_limit, context_limit, or repeats: the same reply in the same state too often (`evaluation.repeats`).';
comment on column trajectory.copied_from is 'As tree.copied_from, for rollouts.';
comment on column sample.kind is 'revision, good, general, expert, judge, chosen, rejected, or a word of the method that made it.';

create table derivation (
    child_id varchar not null,
    parent_id varchar not null,
    operator varchar not null,
    position integer,
    prompt_hash varchar not null,
    seed bigint,
    iteration_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (child_id, parent_id)
);
comment on table derivation is 'A trajectory that a method made of another one.';
comment on column derivation.child_id is 'trajectory_id of what was made.';
comment on column derivation.parent_id is 'trajectory_id of what it was made of; a child of several parents has a row for each.';
comment on column derivation.position is 'The step at which the child leaves the parent, counted from 0; null where it is another one as a whole.';
comment on column derivation.seed is 'Seed of what was drawn for it; null where nothing was.';

create table tool_call (
    kind varchar not null,
    owner_id varchar not null,
    position integer not null,
    number integer not null,
    tool varchar not null,
    provider varchar not null,
    parameters json not null,
    key varchar not null,
    status varchar not null,
    milliseconds double not null,
    cached boolean not null,
    output_id varchar not null,
    output_bytes bigint not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (kind, owner_id, position, number)
);
comment on table tool_call is 'A call of a tool in a step, as the environment tells.';
comment on column tool_call.kind is 'node or step: the table of the step that made the call.';
comment on column tool_call.owner_id is 'tree_id of a node, trajectory_id of a step.';
comment on column tool_call.position is 'node_index of a node, position of a step.';
comment on column tool_call.number is 'Number of the call in its step, from 0.';
comment on column tool_call.provider is 'Who answered: a search index, an interpreter; empty where there is only one.';
comment on column tool_call.key is 'What was asked for in normal form: calls of one tool, provider and key ask the same.';
comment on column tool_call.status is 'ok, empty, error, timeout, or another word of the tool.';
comment on column tool_call.milliseconds is 'How long the call took.';
comment on column tool_call.cached is 'Whether the output came from a cache.';
comment on column tool_call.output_id is 'The output as the tool gave it; the observation may show less of it.';
comment on column tool_call.output_bytes is 'Length of the output in UTF-8.';

create table answer (
    kind varchar not null,
    owner_id varchar not null,
    position integer not null,
    purpose varchar not null,
    number integer not null,
    role varchar not null,
    model varchar not null,
    prompt_hash varchar not null,
    seed bigint not null,
    reply_id varchar not null,
    finish_reason varchar not null,
    prompt_tokens integer not null,
    completion_tokens integer not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (kind, owner_id, position, purpose, number)
);
comment on table answer is 'What a model was asked on the side of an episode and said: by a step of the environment, or by a grader.';
comment on column answer.kind is 'node or step: the table of the step that asked, or after which the grader did.';
comment on column answer.owner_id is 'tree_id of a node, trajectory_id of a step.';
comment on column answer.position is 'node_index of a node, position of a step.';
comment on column answer.number is 'Number of the answer among those of its step and purpose, from 0.';
comment on column answer.role is 'The role of the model: judge, editor, summariser, actor.';
comment on column answer.model is 'Fingerprint of the model.';
comment on column answer.prompt_hash is 'Hash of the messages that it was asked with.';

create table grade (
    kind varchar not null,
    owner_id varchar not null,
    position integer not null,
    given_by varchar not null,
    reward double not null,
    success boolean not null,
    environment_reward double not null,
    environment_success boolean not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (kind, owner_id, position)
);
comment on table grade is 'The reward of an episode that a grader gave after its last step; answer has the words of the model it asked.';
comment on column grade.kind is 'node or step: the table of the last step of the episode.';
comment on column grade.owner_id is 'tree_id of a node, trajectory_id of a step.';
comment on column grade.position is 'node_index of a node, position of a step.';
comment on column grade.given_by is 'rule, or model: then a model was asked.';
comment on column grade.reward is 'In [0, 1]; the step and its trajectory have the same.';
comment on column grade.environment_reward is 'What the environment had given for the step.';
comment on column metric.name is 'In scope evaluation: see v_metrics; depth-2/... is the number of difficulty class 2, world-sciworld/... that of one of several worlds.';
