-- The contents of the file of general data, of which a run's id has only the name.

comment on table stage_input is 'What decides the replies of a stage, as one hash for each run, and for stage dataset the SHA-256 of its general data; runs of earlier versions have none.';
