"""Opening the database file for one burst. The caller holds the lock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from agentr_core.store import faults, lock

# A burst that closed with a checkpoint would rewrite the last row group of every table it touched:
# 250 ms a burst at 100,000 nodes. Small row groups make checkpoints cheap, and the size of the log
# decides when there is one. Each open replays the log, at 0.1 ms of processor time for a small
# transaction, so it is kept short.
_ROW_GROUP_ROWS = 16_384
_LOG_LIMIT = "1MB"
_RETRY_S = 0.02
# One thread while the file is opened: more take four times the processor time to replay a small
# log.
_READING_THREADS = 4


@contextmanager
def connected(path: Path, deadline: float, *, read_only: bool) -> Iterator[Any]:
    """Return a connection whose default database is the file at `path`, closed after the body.

    Programs that have the file open without our lock, such as the duckdb shell, are waited for
    until `deadline` (`time.monotonic()`).

    Raises:
        StoreBusy: such a program kept the file for longer.
        duckdb.Error: the file cannot be opened.
    """
    options = "read_only" if read_only else f"row_group_size {_ROW_GROUP_ROWS}"
    # From the root: DuckDB takes what stands before a first colon for a kind of database.
    name = str(path.absolute()).replace("'", "''")
    con = duckdb.connect(
        config={
            "threads": 1,
            "checkpoint_threshold": _LOG_LIMIT,
            "temp_directory": f"{path}.tmp",
            "autoinstall_known_extensions": False,
            # A name in a query means a table of the store, never a variable of the program around
            # it.
            "python_enable_replacements": False,
        }
    )
    try:
        con.execute("pragma disable_checkpoint_on_shutdown; set enable_progress_bar = false")
        _attach(con, f"attach '{name}' as store ({options})", path, deadline)
        con.execute("use store")
        if read_only:
            con.execute(f"set threads = {_READING_THREADS}")
        yield con
    finally:
        con.close()


@contextmanager
def storage_faults(path: Path) -> Iterator[None]:
    """Turn DuckDB's errors about the file at `path` into ours; let the others through."""
    try:
        yield
    except duckdb.Error as error:
        fault = faults.storage_fault(error, path)
        if fault is None:
            raise
        raise fault from error


def _attach(con: Any, statement: str, path: Path, deadline: float) -> None:
    while True:
        try:
            con.execute(statement)
        except duckdb.Error as error:
            if not faults.held_elsewhere(error):
                raise
            if time.monotonic() >= deadline:
                raise lock.busy(path, faults.holder(error)) from error
            time.sleep(_RETRY_S)
        else:
            return
