-- What an environment that knows the truth says of judged paths.

create table oracle_verdict (
    tree_id varchar not null,
    node_index integer not null,
    verdict varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table oracle_verdict is 'The true verdict on a step of a judged path, where the environment knows it; a report of an iteration asks for it and stores it.';
comment on column oracle_verdict.verdict is 'good, bad or uncertain.';
