"""Merging the rows of other stores, such as those of other machines, into one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentr_core.errors import CorruptStore, StoreError
from agentr_core.store import lock
from agentr_core.store.care.rewriting import Rewritten, attached, copy, rewrite
from agentr_core.store.connection import connected, quoted, storage_faults
from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES

_OF_A_MACHINE: Mapping[str, tuple[str, ...]] = {
    "run": ("workspace",),
    "checkpoint": ("path",),
    "tree": ("writer",),
    # Two runs may train on the same chat, say: as within one store, it belongs to the iteration
    # that had it first, and is counted with the tokenizer of that iteration.
    "sample": ("iteration_id", "num_tokens", "num_trained_tokens"),
    # Of two answers of a tool to the same call, either will do.
    "answered_call": ("provider", "status", "milliseconds", "output_id"),
}
"""Columns that may differ between machines: the existing row stays."""
_KNOWN_LATER: Mapping[str, tuple[str, ...]] = {"instance": ("depth", "origin_id"), "checkpoint": ("parent_id",)}
"""Columns that may be known in one store and unknown in another: the known value counts."""


def merge_stores(store: Store, others: Sequence[Store]) -> Rewritten:
    """Merge the rows of other stores into one, each row once, and return what changed.

    Only rows of our tables are taken: tables that somebody else has put into another store stay
    there, as do the weights, datasets and reports that rows name. Nothing is written to the other
    stores, nor beside them.

    Raises:
        StoreError: two stores have rows of the same id with different content, one of the others is
            the store itself, or as for `rewrite`. Nothing is changed then.
    """
    for other in others:
        if other.path.exists() and store.path.exists() and other.path.samefile(store.path):
            raise StoreError(f"{other.path} is the store itself; name another one to merge")
    folder = store.path.with_name(f"{store.path.name}.merged")
    # What a killed process may have left.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        copies = {folder / f"{number}.duckdb": other.path for number, other in enumerate(others)}
        for taken, path in copies.items():
            _copy(path, taken, time.monotonic() + store.wait_s)

        def fill(con: Any) -> None:
            copy(con)
            for taken, path in copies.items():
                _take(con, taken, path)

        found, _ = rewrite(store, fill, beside=tuple(copies))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _copy(path: Path, copy: Path, deadline: float) -> None:
    """Copy the file of another store with its log, and bring the copy up to date.

    Raises `StoreError` for a file that is no store, and `StoreBusy`.
    """
    no_store = StoreError(
        f"{path} is no store of agentr, or damaged; nothing was merged: name a workspace, or the file of a store"
    )
    try:
        # While DuckDB has the file open for reading, nobody writes to it, and no lock file of ours
        # is needed beside it.
        with lock.held_if_shared(path, deadline), storage_faults(path), connected(path, deadline, read_only=True):
            copy.parent.mkdir(exist_ok=True)
            for ending in ("", ".wal"):
                source = path.with_name(f"{path.name}{ending}")
                if source.exists():
                    shutil.copyfile(source, copy.with_name(f"{copy.name}{ending}"))
        state = Store(copy)
        # A database without tables would be migrated to a store, too.
        if not state.version():
            raise no_store
        state.checkpoint()
    except CorruptStore as error:
        # Its advice is for one's own store.
        raise no_store from error
    except OSError as error:
        raise StoreError(f"{path} cannot be copied to {copy.parent}: {error.strerror}; free some disk space") from error
    except StoreError as error:
        # The sentence is about the store, not about our copy of it.
        raise type(error)(str(error).replace(str(copy), str(path))) from error


def _take(con: Any, copy: Path, path: Path) -> None:
    with attached(con, copy, "other"):
        for table, facts in TABLES.items():
            later = _KNOWN_LATER.get(table, ())
            columns = [name for (name,) in con.execute(_COLUMNS, [table]).fetchall()]
            same = [name for name in columns if name not in {*facts.key, *later, *_OF_A_MACHINE.get(table, ())}]
            _check(con, path, table, same, later)
            key = ", ".join(map(quoted, facts.key))
            matching = " and ".join(f"t.{quoted(column)} = o.{quoted(column)}" for column in facts.key)
            for column in later:
                con.execute(_LEARN.format(table=quoted(table), column=quoted(column), matching=matching))
            names = ", ".join(map(quoted, (*columns, "created_at")))
            con.execute(_ADD.format(table=quoted(table), key=key, columns=names))


def _check(con: Any, path: Path, table: str, same: Sequence[str], later: Sequence[str]) -> None:
    """Raise `StoreError` if a row is in both stores and differs."""
    key = TABLES[table].key
    differs = {
        **{name: f"s.{quoted(name)} is distinct from o.{quoted(name)}" for name in same},
        **{name: f"s.{quoted(name)} <> o.{quoted(name)}" for name in later},
    }
    if not differs:
        return
    sql = _CONFLICT.format(
        table=quoted(table),
        key=", ".join(map(quoted, key)),
        condition=" or ".join(differs.values()),
        columns=", ".join(differs.values()),
    )
    found = con.execute(sql).fetchone()
    if found is not None:
        names = [name for name, other in zip(differs, found[len(key) :], strict=True) if other]
        raise StoreError(
            f"{table} {', '.join(map(str, found[: len(key)]))} is in both stores and differs in {', '.join(names)}; "
            f"nothing was taken from {path}: prune one of the two, or keep them apart"
        )


# Of a table of ours somebody may have more columns.
_COLUMNS = """
select s.column_name from duckdb_columns() s join duckdb_columns() o using (schema_name, table_name, column_name)
where s.database_name = 'store' and o.database_name = 'other' and schema_name = 'main' and table_name = ?
    and column_name <> 'created_at' order by s.column_index
"""
_CONFLICT = """
select {key}, {columns} from store.main.{table} s join other.main.{table} o using ({key}) where {condition} limit 1
"""
_LEARN = """
update store.main.{table} t set {column} = o.{column}
from other.main.{table} o where {matching} and t.{column} is null and o.{column} is not null
"""
_ADD = """
insert into store.main.{table} ({columns})
select {columns} from other.main.{table} anti join store.main.{table} using ({key})
"""
