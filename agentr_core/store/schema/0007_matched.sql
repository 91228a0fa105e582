-- The action that an environment carried out in the place of the agent's.

alter table node add column matched varchar;
comment on column node.matched is 'The possible action that was carried out in the place of the agent''s, which may be the same; null where the environment takes actions as they are.';
alter table step add column matched varchar;
comment on column step.matched is 'As node.matched.';
