-- Of a model that thinks, a reply that was cut within its thought says nothing.

alter table generation add column thinks boolean default false;
comment on column generation.thinks is 'Whether the model is known to think first: its prompt opened a thought, or the server returned it apart.';
alter table answer add column thinks boolean default false;
comment on column answer.thinks is 'Whether the model is known to think first: its prompt opened a thought, or the server returned it apart.';
alter table edit add column thinks boolean default false;
comment on column edit.thinks is 'Whether the model is known to think first: its prompt opened a thought, or the server returned it apart.';
