"""The faults in the rows of a store; a sound store has none."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A node or a trajectory whose rows contradict each other."""

    kind: str
    id: str
    position: int
    what: str


def dangling_references(store: Store) -> list[tuple[str, ...]]:
    """Return table, column and value of each reference to a row that is not there."""
    return [tuple(str(value) for value in row) for row in store.rows("select * from v_orphans")]


def contradictions(store: Store) -> list[Contradiction]:
    """Return the contradictions between rows of the store, sorted."""
    rows = store.rows("select kind, id, position, what from v_contradictions order by all")
    return [Contradiction(*row) for row in rows]
