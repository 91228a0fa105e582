-- Which checkpoint an iteration promotes, where a recipe has the best one go on (`promote: best`); and of reinforcement
-- learning the validations between its steps, and advantages of single steps.

alter table iteration add column promoted varchar;
comment on column iteration.promoted is 'The checkpoint that goes on after this iteration: of those made so far, the model that the run begins with among them, the one that succeeds most often on the development set. Null before it is known, and where the last one goes on.';

comment on column checkpoint.parent_id is 'What it was trained from; of the model that a run starts from, the checkpoint of another run with the same weights, where there is one.';

create table rl_validation (
    trajectory_id varchar primary key,
    iteration_id varchar not null,
    step integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table rl_validation is 'An episode of the development set that the policy played greedily after a step; all of a validation are stored at once.';

create table rl_credit (
    trajectory_id varchar not null,
    position integer not null,
    advantage double not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (trajectory_id, position)
);
comment on table rl_credit is 'The advantage of a step of a rollout, where steps have their own (`grpo.credit: siblings`); else it is that of rl_rollout.';
comment on column rl_credit.position is 'That of the step.';
