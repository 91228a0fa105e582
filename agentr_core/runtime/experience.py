"""The experience of an iteration: what was gathered for it, and how far it has been turned into a
checkpoint.
"""

from __future__ import annotations

from agentr_core.runtime.place import Workplace
from agentr_core.store.queries.iterations import count_finished_iterations
from agentr_core.store.queries.published import count_trajectories, published


def next_iteration(place: Workplace) -> int:
    """Return the iteration that a run is at: the first one that is not finished, counted from 1."""
    return count_finished_iterations(place.store, place.run_id) + 1


def has_dataset(place: Workplace, iteration: int) -> bool:
    """Return whether an iteration has a dataset, after which nothing more is gathered for it."""
    return place.store.path.exists() and published(place.store, place.iteration_id(iteration)).dataset_id is not None


def gathered(place: Workplace, iteration: int) -> int:
    """Return how many trajectories an iteration can train on, before any filter: paths of its
    finished trees, rollouts, the flywheel's and the expert's.
    """
    return count_trajectories(place.store, place.iteration_id(iteration))
