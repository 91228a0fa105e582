"""What an iteration has made so far: trajectories, a dataset, a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from agentr_core.store.database import Store

GATHERED = "('rollout', 'flywheel')"
"""The sources, as a list in SQL, of trajectories that are played to be trained on; paths of trees
are not among them.
"""


class Published(NamedTuple):
    """The products of an iteration; all None, and not finished, before there are any."""

    dataset_id: str | None = None
    dataset_hash: str | None = None
    checkpoint_id: str | None = None
    checkpoint_path: str | None = None
    finished: bool = False


def published(store: Store, iteration_id: str) -> Published:
    """Return the products of an iteration."""
    return next((Published(*row) for row in store.rows(_PUBLISHED, iteration_id)), Published())


def count_trajectories(store: Store, iteration_id: str) -> int:
    """Return how many trajectories were gathered for an iteration: leaves of finished trees, and
    episodes that are neither an evaluation's nor made from a pair.
    """
    return store.count(_TRAJECTORIES, iteration_id)


_PUBLISHED = """
select d.dataset_id, d.hash, c.checkpoint_id, c.path, i.status = 'finished'
from iteration i
left join dataset d on d.iteration_id = i.iteration_id
left join checkpoint c on c.checkpoint_id = i.checkpoint_out
where i.iteration_id = ?
"""
_TRAJECTORIES = f"""
select (
    select count(*) from trajectory
    where iteration_id = $1 and (source in {GATHERED} or source = 'expert')
) + (
    select count(*) from node join tree using (tree_id)
    where iteration_id = $1 and finished and stop is not null and parent >= 0
)
"""
