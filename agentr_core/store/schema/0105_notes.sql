-- What people write about trajectories.

create table note (
    trajectory_id varchar primary key,
    tags varchar[] not null,
    text varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table note is 'Tags and a note that a person gave a trajectory in the viewer. No run reads them.';
