"""Merging the rows of other stores, such as those of other machines, into one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentr_core.errors import CorruptStore, StoreError
from agentr_core.store import lock
from agentr_core.store.care.rewriting import Rewritten, attached, copy_rows, rewrite
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

    Only rows are taken: the weights, datasets and reports that they name stay where they are.

    Raises:
        StoreError: two stores have rows of the same id with different content, one of the others is
            the store itself, or as for `rewrite`. Nothing is changed then.
    """
    for other in others:
        if other.path.resolve() == store.path.resolve():
            raise StoreError(f"{other.path} is the store itself; name another one to merge")
        _up_to_date(other)

    def fill(con: Any) -> None:
        copy_rows(con)
        for other in others:
            with lock.held(other.path, exclusive=False, deadline=time.monotonic() + other.wait_s):
                _take(con, other.path)

    found, _ = rewrite(store, fill)
    return found


def _up_to_date(other: Store) -> None:
    """Migrate a store of an older version. Raises `StoreError` for a file that is no store."""
    no_store = StoreError(
        f"{other.path} is no store of agentr, or damaged; nothing was merged: name a workspace, or the file of a store"
    )
    try:
        # A database without tables would be migrated to a store, too.
        if not other.version():
            raise no_store
        with other.reading():
            pass
    except CorruptStore as error:
        # Its advice is for one's own store.
        raise no_store from error


def _take(con: Any, path: Path) -> None:
    with attached(con, path, "other"):
        for table, facts in TABLES.items():
            later = _KNOWN_LATER.get(table, ())
            columns = [name for (name,) in con.execute(_COLUMNS, [table]).fetchall()]
            same = [name for name in columns if name not in {*facts.key, *later, *_OF_A_MACHINE.get(table, ())}]
            _check(con, path, table, same, later)
            key = ", ".join(facts.key)
            matching = " and ".join(f"{table}.{column} = o.{column}" for column in facts.key)
            for column in later:
                con.execute(_LEARN.format(table=table, column=column, matching=matching))
            con.execute(_ADD.format(table=table, key=key))


def _check(con: Any, path: Path, table: str, same: Sequence[str], later: Sequence[str]) -> None:
    """Raise `StoreError` if a row is in both stores and differs."""
    key = TABLES[table].key
    differs = {
        **{name: f"s.{name} is distinct from o.{name}" for name in same},
        **{name: f"s.{name} <> o.{name}" for name in later},
    }
    if not differs:
        return
    sql = _CONFLICT.format(
        table=table, key=", ".join(key), condition=" or ".join(differs.values()), columns=", ".join(differs.values())
    )
    found = con.execute(sql).fetchone()
    if found is not None:
        names = [name for name, other in zip(differs, found[len(key) :], strict=True) if other]
        raise StoreError(
            f"{table} {', '.join(map(str, found[: len(key)]))} is in both stores and differs in {', '.join(names)}; "
            f"nothing was taken from {path}: prune one of the two, or keep them apart"
        )


_COLUMNS = """
select column_name from duckdb_columns()
where database_name = current_database() and table_name = ? and column_name <> 'created_at' order by column_index
"""
_CONFLICT = "select {key}, {columns} from store.{table} s join other.{table} o using ({key}) where {condition} limit 1"
_LEARN = """
update store.{table} set {column} = o.{column}
from other.{table} o where {matching} and {table}.{column} is null and o.{column} is not null
"""
_ADD = "insert into store.{table} by name select * from other.{table} anti join store.{table} using ({key})"
