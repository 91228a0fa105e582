"""The experience of a run's first unfinished iteration, for the flows that gather and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.start import check_run
from agentr_core.stages import outside
from agentr_core.stages.outside import Training
from agentr_core.store.queries.runs import count_finished_iterations, count_trajectories, run_state
from tasks import events
from tasks.wiring import RunRef, quiet_workplace


def iteration_of(run: RunRef, recipe: Recipe) -> int:
    """Return the number of a run's first unfinished iteration, counted from 1."""
    return count_finished_iterations(quiet_workplace(run, recipe).store, run.run_id) + 1


def gathered(run: RunRef, recipe: Recipe, iteration: int) -> int:
    """Return how many trajectories were gathered for an iteration, before any filter."""
    place = quiet_workplace(run, recipe)
    return count_trajectories(place.store, place.iteration_id(iteration))


def collected(run: RunRef, recipe: Recipe, iteration: int, *, enough: int, again: dict[str, Any]) -> int:
    """Return how many trajectories were gathered for an iteration, and send an event with the
    number.

    If the run was interrupted or failed, the event is sent even if the number has not changed, so
    that an automation can start the training again.

    Args:
        enough: how many are enough to train on.
        again: the parameters with which a deployment trains on them.
    """
    place = quiet_workplace(run, recipe)
    # Fold the log into the database file: people copy that one file and take it for the store.
    place.store.checkpoint()
    count = count_trajectories(place.store, place.iteration_id(iteration))
    parameters = {**again, "enough": enough}
    # This process holds the lock of the run, so one that is still "running" was killed.
    state = run_state(place.store, run.run_id)
    anew = state is not None and state.status in ("running", "failed")
    events.collected(place, iteration, trajectories=count, enough=count >= enough, again=parameters, anew=anew)
    return count


def read_outside(run: RunRef, recipe: Recipe, folder: Path) -> tuple[Training, int, bool]:
    """Read what another program trained from its folder. Return it with the iteration as which it
    was, or would be, imported, and whether that import is finished.

    Raises `UserError` if the folder cannot be read, or the run has no iteration for it.
    """
    place, training = quiet_workplace(run, recipe), outside.read_training(folder)
    check_run(place)
    earlier = outside.known_import(place, training)
    if earlier is not None:
        return training, *earlier
    number = outside.next_iteration(place)
    outside.check_plan(place, number)
    return training, number, False


def take_back(run: RunRef, recipe: Recipe, iteration: int, training: Training) -> str:
    """Import what another program trained as an iteration, unless it was imported before, and
    return a sentence about it. Raises `UserError` if it does not fit the run.
    """
    place = quiet_workplace(run, recipe)
    if outside.known_import(place, training) is not None:
        return f"iteration {iteration} of run {run.run_id} has this training already, and is gone on with"
    return outside.take_back(place, iteration, training)
