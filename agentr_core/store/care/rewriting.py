"""Rewriting a store into a new file, which replaces the old one once it is complete.

If a full disk, Ctrl-C or a kill ends the work before that, the old file stays as it is. What
somebody else has put into it, such as tables, views and macros of their own, is copied by DuckDB,
which runs none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import duckdb

from agentr_core.errors import StoreError
from agentr_core.store import lock
from agentr_core.store.connection import connected, literal, quoted, storage_faults
from agentr_core.store.copies import stored_columns
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


def rewrite(
    store: Store, fill: Callable[[Any], T], *, keep: bool = True, beside: Sequence[Path] = ()
) -> tuple[Rewritten, T]:
    """Rewrite a store; return what changed, and what `fill` returned.

    Args:
        fill: fills the new file, `store`, which has no tables yet, from the old one, `old`.
        keep: whether the new file replaces the old one; otherwise this is a dry run.
        beside: other database files that `fill` reads.

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
            gone, result = _filled(store, draft, fill, deadline, beside)
            found = Rewritten(store.path.stat().st_size, draft.stat().st_size, gone)
            if keep:
                _take_over(draft, store.path)
        finally:
            _remove(draft)
    return found, result


def copy(con: Any, conditions: Mapping[str, str] = _NOTHING) -> None:
    """Copy everything in the old file, but of our tables in `conditions` only rows that meet the
    SQL condition.

    Raises:
        StoreError: a row of somebody else's table refers to one that is not copied.
    """
    # DuckDB would copy rows, too, but not in the order that foreign keys ask for, and fails then.
    con.execute(f"copy from database {OLD} to store (schema)")
    left = []
    for schema, table, columns in stored_columns(con, OLD, "store"):
        condition = conditions.get(table.lower(), "true") if schema == "main" else "true"
        name = f"{quoted(schema)}.{quoted(table)}"
        left.append(f"insert into store.{name} ({columns}) select {columns} from {OLD}.{name} where {condition}")
    while left:
        later = [statement for statement in left if not _done(con, statement)]
        if len(later) == len(left):
            raise StoreError(
                "nothing was changed: a table that is not agentr's refers to rows that would go; remove what refers to "
                "them first"
            )
        left = later


def _done(con: Any, statement: str) -> bool:
    try:
        con.execute(statement)
    except duckdb.ConstraintException:
        return False
    return True


def compact(store: Store) -> Rewritten:
    """Rewrite a store without the unused space in its file, and return what changed. Raises as
    `rewrite` does.
    """
    found, _ = rewrite(store, copy)
    return found


@contextmanager
def attached(con: Any, path: Path, name: str) -> Iterator[None]:
    """Attach the file at a path, one of those beside the connection's own, to the connection for
    the body, for reading, under a name. The caller holds its lock.
    """
    con.execute(f"attach {literal(str(path.absolute()))} as {quoted(name)} (read_only)")
    try:
        yield
    finally:
        con.execute(f"detach {quoted(name)}")


def _filled(
    store: Store, draft: Path, fill: Callable[[Any], T], deadline: float, beside: Sequence[Path]
) -> tuple[dict[str, int], T]:
    with (
        storage_faults(draft),
        connected(draft, deadline, read_only=False, beside=(store.path, *beside)) as con,
    ):
        with attached(con, store.path, OLD):
            result = fill(con)
            _check_references(con, store.path)
            counts = {table: con.execute(_GONE.format(table=quoted(table))).fetchall()[0][0] for table in TABLES}
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


# The schema is named, too: somebody may have one that is called `old` or `store`.
_GONE = "select (select count(*) from old.main.{table}) - (select count(*) from store.main.{table})"
_ORPHANS = "select * from store.main.v_orphans except select * from old.main.v_orphans order by all limit 100"
