"""Several reads of one state of a store, in one burst."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from agentr_core.store.database import Store
from agentr_core.store.tables import Rows

T = TypeVar("T")


class _Snapshot(Store):
    def __init__(self, store: Store, con: Any) -> None:
        super().__init__(store.path, store.wait_s)
        self._con = con
        self.later: list[Rows] = []

    def write(self, rows: Rows) -> None:
        self.later.append(rows)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        yield self._con


@contextmanager
def snapshot(store: Store) -> Iterator[_Snapshot]:
    """Return a store for reading: all that is asked of it sees the same state, and the file is
    opened once, which takes longer than most questions.

    Writers wait until the body ends, so keep it short. What the body itself writes is stored once
    it has ended, and not if it failed. Raises as `Store.reading` and `Store.write`.
    """
    with store.reading() as con:
        state = _Snapshot(store, con)
        yield state
    for rows in state.later:
        store.write(rows)


def settled(store: Store, read: Callable[[Store], T]) -> T:
    """Return what is read of one state of a store, in which all is that the reading itself writes:
    where it writes, it is done once more. Raises as `snapshot`, and what `read` raises.
    """
    with snapshot(store) as state:
        found = read(state)
    if not any(state.later):
        return found
    with snapshot(store) as state:
        return read(state)
