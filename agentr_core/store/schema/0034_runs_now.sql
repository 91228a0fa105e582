-- A killed process records no end.

comment on column run.status is 'What was recorded last: running, finished or failed; evaluating: there is only an evaluation of its model, which is not done; collecting: there is only what was gathered for its first iteration. A killed process records nothing more: v_runs tells.';
