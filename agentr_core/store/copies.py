"""Copies of database files."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import duckdb

from agentr_core.errors import StoreError
from agentr_core.store import migrations
from agentr_core.store.connection import connected, quoted, storage_faults
from agentr_core.texts import placed


def copy_sound(source: Path, target: Path, newest: int) -> None:
    """Copy a database to `target` while nobody writes to it; `target` appears once the copy is
    complete and every block of it can be read.

    Args:
        newest: the schema version of the source.

    Raises:
        StoreError: `target` exists, its folder is missing or a file, or the disk is full.
        CorruptStore: the copy cannot be read.
    """
    if target.exists():
        raise StoreError(f"{placed(target)} exists already; name another file")
    if not target.parent.is_dir():
        raise StoreError(
            f"{target} cannot be written: {placed(target.parent)} is no folder; make it, or name another file"
        )
    draft = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        shutil.copyfile(source, draft)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        with storage_faults(draft), connected(draft, time.monotonic(), read_only=True) as con:
            migrations.check(con, draft, newest)
            # DuckDB checks the sum of a block only when it is read.
            con.execute("copy from database store to memory (schema)")
            for schema, table, columns in stored_columns(con, "store", "memory"):
                con.execute(f"select count(hash({columns})) from store.{quoted(schema)}.{quoted(table)}")
        # If a file has appeared there meanwhile, a link fails; a rename would replace the file.
        os.link(draft, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror}); name another file, or free space") from error
    finally:
        draft.unlink(missing_ok=True)


def stored_columns(con: Any, database: str, twin: str) -> list[tuple[str, str, str]]:
    """Return schema, name and quoted columns of each table in an attached database.

    Columns that are computed when they are read are left out: their expressions may be anybody's.

    Args:
        twin: an attached database with the same tables that can be written; nothing is.
    """
    columns: dict[tuple[str, str], list[str]] = {}
    for schema, table, column in con.execute(_COLUMNS, [database]).fetchall():
        columns.setdefault((schema, table), []).append(column)
    stored = []
    for schema, table, computes in con.execute(_TABLES, [database]).fetchall():
        names = columns[schema, table]
        if computes:
            names = [name for name in names if _takes(con, twin, schema, table, name)]
        stored.append((schema, table, ", ".join(map(quoted, names))))
    return stored


def _takes(con: Any, database: str, schema: str, table: str, column: str) -> bool:
    """Return whether a column takes values, by a statement that is only planned: DuckDB lists
    columns that are computed like others.
    """
    try:
        con.execute(f"explain insert into {database}.{quoted(schema)}.{quoted(table)} ({quoted(column)}) values (null)")
    except duckdb.BinderException as error:
        if "generated column" not in str(error):
            raise
        return False
    return True


_TABLES = """
select schema_name, table_name, contains(sql, 'GENERATED ALWAYS') from duckdb_tables() where database_name = ?
order by table_oid
"""
_COLUMNS = """
select schema_name, table_name, column_name from duckdb_columns() where database_name = ? order by column_index
"""
