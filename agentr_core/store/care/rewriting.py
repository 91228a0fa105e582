"""Rewriting a store into a new file, which replaces the old one once it is complete.

If a full disk, Ctrl-C or a kill ends the work before that, the old file stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentr_core.errors import StoreError
from agentr_core.store import lock, migrations
from agentr_core.store.connection import connected, storage_faults
from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES
from agentr_core.writing import sync

T = TypeVar("T")
OLD = "old"
"""The name of the old file in the connection to the new one, which is named `store`."""
_NOTHING: Mapping[str, str] = {}


class Rewritten(NamedTuple):
    """The size of the file before and after, in bytes, and how many rows each table lost."""

    before: int
    after: int
    gone: Mapping[str, int]


def rewrite(store: Store, fill: Callable[[Any], T], *, keep: bool = True) -> tuple[Rewritten, T]:
    """Rewrite a store; return what changed, and what `fill` returned.

    Args:
        fill: fills the tables of the new file, `store`, from those of the old one, `old`.
        keep: whether the new file replaces the old one; otherwise this is a dry run.

    Raises:
        StoreError: there is no store, the new file would have dangling references, or the disk is
            full. Nothing is changed then.
        StoreBusy, CorruptStore: as for `Store.transaction`.
    """
    store.checkpoint()
    deadline = time.monotonic() + store.wait_s
    draft = store.path.with_name(f"{store.path.name}.rewritten")
    with lock.held(store.path, exclusive=True, deadline=deadline), storage_faults(store.path):
        with connected(store.path, deadline, read_only=False) as con:
            # Other processes may have written since; rows in the log would be lost with the old
            # file.
            con.execute("checkpoint")
        try:
            _remove(draft)
            gone, result = _filled(store, draft, fill, deadline)
            found = Rewritten(store.path.stat().st_size, draft.stat().st_size, gone)
            if keep:
                _take_over(draft, store.path)
        finally:
            _remove(draft)
    return found, result


def copy_rows(con: Any, conditions: Mapping[str, str] = _NOTHING) -> None:
    """Copy all rows of the old file; for tables in `conditions`, only rows that meet the SQL
    condition.
    """
    for table in TABLES:
        con.execute(_COPY.format(table=table, condition=conditions.get(table, "true")))


def compact(store: Store) -> Rewritten:
    """Rewrite a store without the unused space in its file, and return what changed. Raises as
    `rewrite` does.
    """
    found, _ = rewrite(store, copy_rows)
    return found


@contextmanager
def attached(con: Any, path: Path, name: str) -> Iterator[None]:
    """Attach the file at a path to a connection for the body, for reading, under a name. The caller
    holds its lock.
    """
    quoted = str(path.absolute()).replace("'", "''")
    con.execute(f"attach '{quoted}' as {name} (read_only)")
    try:
        yield
    finally:
        con.execute(f"detach {name}")


def _filled(store: Store, draft: Path, fill: Callable[[Any], T], deadline: float) -> tuple[dict[str, int], T]:
    with storage_faults(draft), connected(draft, deadline, read_only=False) as con:
        migrations.migrate(con, draft, migrations.available())
        with attached(con, store.path, OLD):
            # The times of the migrations belong to the history of the old file.
            con.execute(_VERSIONS)
            result = fill(con)
            _check_references(con, store.path)
            counts = {table: con.execute(_GONE.format(table=table)).fetchall()[0][0] for table in TABLES}
        con.execute("checkpoint")
    return {table: count for table, count in counts.items() if count}, result


def _check_references(con: Any, path: Path) -> None:
    """Raise `StoreError` if the new file has a dangling reference that the old one does not
    have.
    """
    new = con.execute(_ORPHANS).fetchall()
    if new:
        raise StoreError(
            f"{path} was left as it is: written anew it would have {len(new)} references that point nowhere, such as "
            f"{' '.join(map(str, new[0]))}; look at it with `agentr store check`"
        )


def _take_over(draft: Path, path: Path) -> None:
    """Replace the old file with a finished one, and sync the file and its new name to the disk."""
    log = path.with_name(f"{path.name}.wal")
    if log.exists() and log.stat().st_size:
        raise StoreError(f"{log} has rows that are not in {path} yet; try again when nobody else writes")
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def _remove(draft: Path) -> None:
    for leftover in (draft, draft.with_name(f"{draft.name}.wal")):
        leftover.unlink(missing_ok=True)


_VERSIONS = "insert or replace into store.schema_version by name select * from old.schema_version"
_COPY = "insert into store.{table} by name select * from old.{table} where {condition}"
_GONE = "select (select count(*) from old.{table}) - (select count(*) from store.{table})"
_ORPHANS = "select * from store.v_orphans except select * from old.v_orphans order by all limit 100"
