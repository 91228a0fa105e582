-- A forecast of a first iteration stored that iteration's choice of instances although no iteration had begun. The choice is
-- made of the recipe and its seed alone, so an iteration that begins later makes it again.

delete from chosen_instance where iteration_id not in (select iteration_id from iteration);
