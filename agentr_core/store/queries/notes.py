"""What people wrote about trajectories."""

from __future__ import annotations

from agentr_core.store.database import Store
from agentr_core.store.tables import Note, row_of


def note_of(store: Store, trajectory_id: str) -> Note | None:
    """Return the note of a trajectory, empty before anybody wrote one; None if there is no such
    trajectory.
    """
    rows = store.rows(
        "select coalesce(o.tags, []), coalesce(o.text, '') from trajectory t left join note o using (trajectory_id) "
        "where t.trajectory_id = $1",
        trajectory_id,
    )
    return Note(tags=tuple(rows[0][0]), text=rows[0][1]) if rows else None


def write_note(store: Store, trajectory_id: str, note: Note) -> None:
    """Store the note of a trajectory in place of the one before. Raises as `Store.write` does."""
    store.write({"note": [row_of("note", note, trajectory_id=trajectory_id)]})
