-- A run of which there is only experience, gathered to be trained on later.

comment on column run.status is 'running, finished or failed; evaluating: there is only an evaluation of its model, which is not done; collecting: there is only what was gathered for its first iteration.';
