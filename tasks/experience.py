"""The experience of a run's first unfinished iteration, for the flows that gather and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.start import check_run_weights
from agentr_core.stages import outside
from agentr_core.stages.outside import OutsideTraining
from agentr_core.store.queries.runs import count_finished_iterations, count_trajectories, run_state
from tasks import events
from tasks.wiring import RunRef, quiet_context


def unfinished_iteration(run: RunRef, recipe: Recipe) -> int:
    """Return the number of a run's first unfinished iteration, counted from 1."""
    return count_finished_iterations(quiet_context(run, recipe).store, run.run_id) + 1


def count_gathered(run: RunRef, recipe: Recipe, iteration: int) -> int:
    """Return how many trajectories were gathered for an iteration, before any filter."""
    ctx = quiet_context(run, recipe)
    return count_trajectories(ctx.store, ctx.iteration_id(iteration))


def report_collected(
    run: RunRef, recipe: Recipe, iteration: int, *, enough: int, training_parameters: dict[str, Any]
) -> int:
    """Return how many trajectories were gathered for an iteration, and send an event with the
    number.

    If the run was interrupted or failed, the event is sent even if the number has not changed, so
    that an automation can start the training again.

    Args:
        enough: how many are enough to train on.
        training_parameters: the parameters with which a deployment trains on them.
    """
    ctx = quiet_context(run, recipe)
    # Fold the log into the database file: people copy that one file and take it for the store.
    ctx.store.checkpoint()
    count = count_trajectories(ctx.store, ctx.iteration_id(iteration))
    parameters = {**training_parameters, "enough": enough}
    # This process holds the lock of the run, so one that is still "running" was killed.
    state = run_state(ctx.store, run.run_id)
    send_again = state is not None and state.status in ("running", "failed")
    events.send_collected(
        ctx,
        iteration,
        trajectories=count,
        enough=count >= enough,
        training_parameters=parameters,
        send_again=send_again,
    )
    return count


def read_outside(run: RunRef, recipe: Recipe, folder: Path) -> tuple[OutsideTraining, int, bool]:
    """Read what another program trained from its folder. Return it with the iteration as which it
    was, or would be, imported, and whether that import is finished.

    Raises `UserError` if the folder cannot be read, or the run has no iteration for it.
    """
    ctx, training = quiet_context(run, recipe), outside.read_training(folder)
    check_run_weights(ctx)
    earlier = outside.find_import(ctx, training)
    if earlier is not None:
        return training, *earlier
    number = outside.next_iteration(ctx)
    outside.check_plan(ctx, number)
    return training, number, False


def import_weights(run: RunRef, recipe: Recipe, iteration: int, training: OutsideTraining) -> str:
    """Import weights that another program trained, as an iteration of the run, unless it has them
    already; return a sentence about it. Raises `UserError` if it does not fit the run.
    """
    ctx = quiet_context(run, recipe)
    if outside.find_import(ctx, training) is not None:
        return f"iteration {iteration} of run {run.run_id} has already imported this training, and continues from it"
    return outside.import_training(ctx, iteration, training)
