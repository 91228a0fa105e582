"""The states from which the revision test of a run continues."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class RevisionState:
    """The first `cut` steps of a failed episode, which is number `repeat` of its instance."""

    trajectory_id: str
    repeat: int
    cut: int


def revision_states(store: Store, run_id: str) -> list[RevisionState]:
    """Return the states of a run's revision test in their order; none before they are chosen."""
    rows = store.rows(
        "select trajectory_id, repeat, cut from revision_state where run_id = ? order by position", run_id
    )
    return [RevisionState(*row) for row in rows]
