-- Groups may also go on from the beginning of the expert's episode.

comment on column rl_group.prefix is 'Steps that its episodes were given: the beginning of a failed episode or of the expert''s, which derivation names; they are not trained. 0: they begin at the start.';
comment on column rl_step.recovered is 'Share of the episodes that went on from a failed one and succeeded; null where none did. The shares and means beside it are of those that began at the start.';
