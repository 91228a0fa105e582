-- Which questions a stage of reinforcement learning trains on, and rewards that are shaped within a group.

create table selection (
    iteration_id varchar not null,
    instance_id varchar not null,
    episodes integer not null,
    correctness double not null,
    cost double not null,
    s_corr double,
    s_tool double,
    front integer,
    crowding double,
    selected boolean not null,
    reason varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, instance_id)
);
comment on table selection is 'An instance of which a stage of the curriculum has rollouts, and whether it is trained on.';
comment on column selection.episodes is 'Rollouts that were played.';
comment on column selection.correctness is 'Their mean reward.';
comment on column selection.cost is 'Their mean number of tool calls, or of steps where `et_agent.curriculum.counts` says so.';
comment on column selection.s_corr is 'Standard deviation of the reward over the rollouts; null where some are missing.';
comment on column selection.s_tool is 'That of the number of calls, or steps.';
comment on column selection.front is 'The front of the Pareto order, from 0; null where a filter came before it; 0 of all that could be drawn at random.';
comment on column selection.crowding is 'Crowding distance within the front; infinite at its ends.';
comment on column selection.reason is 'chosen; incomplete: rollouts failed for good; alike: all right or all wrong; crowded: in the front that was cut, too close to others; dominated: in a front after it; not-drawn: others were drawn at random.';

alter table rl_rollout add column shaped double;
comment on column rl_rollout.shaped is 'What the episode is worth to the training, from which its advantage comes; null where that is the reward of its trajectory.';
alter table rl_step add column shaped double;
comment on column rl_step.shaped is 'Mean of what the episodes of the step are worth to the training; null where that is their reward.';
comment on column rl_group.contrast is 'Whether what its episodes are worth differs; only such groups are trained on.';

comment on column answer.purpose is 'step: the step goes on with it; grade: a reward was read from it; conciseness: a vote on a finished episode.';
