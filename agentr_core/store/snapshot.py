"""Several reads of one state of a store, in one burst."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from agentr_core.store.database import Store, put
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


class _Burst(_Snapshot):
    def write(self, rows: Rows) -> None:
        put(self._con, rows)


@contextmanager
def burst(store: Store) -> Iterator[Store]:
    """Return a store whose queries see what the body has written to it: all of that is stored once
    the body has ended, and nothing of it if the body fails or the process dies.

    Others wait until then, so keep it short. Raises as `Store.transaction` does.
    """
    with store.transaction() as con:
        yield _Burst(store, con)


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
