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
    """Return a store for reading: all queries to it see the same state, and the file is opened only
    once, which takes longer than most queries.

    Writers wait until the body ends, so keep it short. Rows that the body itself writes are stored
    once it has ended, unless it failed. Raises as `Store.reading` and `Store.write` do.
    """
    with store.reading() as con:
        state = _Snapshot(store, con)
        yield state
    for rows in state.later:
        store.write(rows)


def settled(store: Store, read: Callable[[Store], T]) -> T:
    """Return the result of `read` on one state of a store that includes the rows `read` itself
    writes: if it writes any, it is run once more. Raises as `snapshot` does, and what `read`
    raises.
    """
    with snapshot(store) as state:
        found = read(state)
    if not any(state.later):
        return found
    with snapshot(store) as state:
        return read(state)
