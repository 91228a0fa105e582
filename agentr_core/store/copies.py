"""A copy of a database file whose log is empty."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from agentr_core.errors import StoreError
from agentr_core.store import migrations
from agentr_core.store.connection import connected, storage_faults
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
            for (table,) in con.execute("select table_name from duckdb_tables()").fetchall():
                con.execute(f"select count(hash(t)) from {table} t")
        # If a file has appeared there meanwhile, a link fails; a rename would replace the file.
        os.link(draft, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror}); name another file, or free space") from error
    finally:
        draft.unlink(missing_ok=True)
