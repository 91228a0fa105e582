-- Steps that are summaries of a history that filled the context (`context: summary`).

alter table trajectory add column steps.element.summary_of bigint;
alter table node add column step.summary_of bigint;
