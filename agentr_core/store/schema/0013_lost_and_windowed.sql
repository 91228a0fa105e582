-- Episodes that failed for good in the scores, and replies that were read through a window.

alter table node add column dropped integer;
comment on column node.dropped is 'Exchanges of the history that were left out of what the reply was drawn from (`context: window`); null in rows of versions that left out none.';
alter table step add column dropped integer;
comment on column step.dropped is 'As node.dropped.';
