"""Whether weights on the disk are those that the rows of the store made.

A store may lack rows whose weights are still there: after `agentr store prune`, or when a backup
was put in its place. What goes on from such weights would be a model of which the store cannot say
what it was trained on.
"""

from __future__ import annotations

from pathlib import Path

from agentr_core.errors import ModelDirectoryError, StoreError
from agentr_core.fingerprint import fingerprint
from agentr_core.runtime.place import Workplace
from agentr_core.store.queries.datasets import whole_datasets
from agentr_core.store.queries.groups import step_hashes
from agentr_core.store.queries.iterations import checkpoint_made, trained_iterations
from agentr_core.training.checkpoints import Manifest, read_manifest


def rows_of(place: Workplace, iteration_id: str) -> str:
    """Return the hash of the rows of all steps of reinforcement learning of an iteration."""
    return fingerprint(sorted(step_hashes(place.store, iteration_id).items()))


def check_weights(place: Workplace, iteration: int, folder: Path, *, parent_weights: str) -> None:
    """Check that published weights, which a stage of an iteration found, were made of the rows of
    the store and of the weights that the iteration starts from.

    Raises `StoreError` otherwise.
    """
    manifest = read_manifest(folder)
    if not _has_rows(place, iteration, manifest):
        raise StoreError(
            f"{folder} was trained on rows that {place.store.path} lacks or has otherwise (iteration {iteration} of "
            f"run {place.run_id}); put back a store that has them, or move that folder away and run again to train anew"
        )
    if manifest.parent_weights not in ("", parent_weights):
        raise StoreError(
            f"{folder} was trained from other weights than those with which iteration {iteration} of run "
            f"{place.run_id} begins now; move that folder away and run again to train anew"
        )


def check_run(place: Workplace, *iterations: int) -> None:
    """Check the weights that iterations of a run have made, by default all of them: they are those
    that are stored, and were made of rows that are stored.

    Weights that are not there are not checked. Raises `StoreError` if others are not right.
    """
    made = trained_iterations(place.store, place.run_id)
    for iteration in made if not iterations else sorted({*made} & {*iterations}):
        stored = checkpoint_made(place.store, place.iteration_id(iteration))
        try:
            manifest = read_manifest(stored.path) if stored is not None and stored.trained else None
        except ModelDirectoryError:
            manifest = None
        if stored is None or manifest is None:
            continue
        if manifest.weights_sha256 != stored.weights_sha256:
            raise StoreError(
                f"the weights in {stored.path} are not those that iteration {iteration} of run {place.run_id} made "
                f"according to {place.store.path}; put back the weights or the store that belong together, or take "
                "the run out with `agentr store prune`, move that folder away and run it again"
            )
        if not _has_rows(place, iteration, manifest):
            raise StoreError(
                f"{stored.path} was trained on rows that {place.store.path} lacks or has otherwise (iteration "
                f"{iteration} of run {place.run_id}); put back a store that has them, or take the run out with "
                "`agentr store prune`, move that folder away and run it again"
            )


def _has_rows(place: Workplace, iteration: int, manifest: Manifest) -> bool:
    key = place.iteration_id(iteration)
    if manifest.dataset_hash:
        return manifest.dataset_hash in whole_datasets(place.store, key)
    if manifest.rows:
        return manifest.rows == rows_of(place, key)
    # Weights of a version that wrote no hash: all their steps must be there.
    return len(step_hashes(place.store, key)) == manifest.steps
