"""The experience of the iteration that a run is at, for the flows that gather and train."""

from __future__ import annotations

from typing import Any

from agentr_core.recipes import Recipe
from agentr_core.runtime import experience
from tasks import events
from tasks.wiring import RunRef, quiet_workplace


def iteration_of(run: RunRef, recipe: Recipe) -> int:
    """Return the iteration that a run is at, counted from 1."""
    return experience.next_iteration(quiet_workplace(run, recipe))


def gathered(run: RunRef, recipe: Recipe, iteration: int) -> int:
    """Return how many trajectories an iteration can train on."""
    return experience.gathered(quiet_workplace(run, recipe), iteration)


def collected(run: RunRef, recipe: Recipe, iteration: int, *, enough: int, again: dict[str, Any]) -> int:
    """Return how many trajectories an iteration has, and tell Prefect, unless they are in a dataset
    already.

    Args:
        enough: how many are enough to train on.
        again: the parameters with which a deployment trains on them.
    """
    place = quiet_workplace(run, recipe)
    # People copy this one file when something has ended, and take it for the store.
    place.store.checkpoint()
    found = experience.gathered(place, iteration)
    if "dataset" not in experience.made(place, iteration):
        told = {**again, "enough": enough}
        events.collected(place, iteration, trajectories=found, enough=found >= enough, again=told)
    return found
