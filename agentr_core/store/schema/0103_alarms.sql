-- What was noticed in a run that a person should look at.

create table alarm (
    alarm_id varchar primary key,
    iteration_id varchar not null,
    stage varchar not null,
    name varchar not null,
    step integer,
    value double not null,
    threshold double not null,
    reaction varchar not null,
    message varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table alarm is 'A threshold of section alarms that was crossed: once for each stage of an iteration and each threshold.';
comment on column alarm.name is 'The field of section alarms that sets the threshold.';
comment on column alarm.step is 'The first step of the training in which it was crossed; null in a stage that trains nothing.';
comment on column alarm.reaction is 'tell, stop or back: what the run did.';
comment on column alarm.message is 'What has happened, and what to do.';
