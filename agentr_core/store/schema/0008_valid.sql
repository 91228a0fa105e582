-- Whether an environment took an action: a refused one is a mistake of the agent, in every world's own words.

alter table node add column valid boolean;
comment on column node.valid is 'Whether the environment took the action; null where it does not tell.';
alter table step add column valid boolean;
comment on column step.valid is 'As node.valid.';
