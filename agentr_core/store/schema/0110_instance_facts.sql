-- What a world tells of its instances, which lists have as columns.

create table instance_facts (
    instance_id varchar primary key,
    facts json not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table instance_facts is 'What the world tells of an instance, where it tells something. No run reads it.';
comment on column instance_facts.facts is 'Values by name, as the world told them last: `facts->>''$.task''`.';
