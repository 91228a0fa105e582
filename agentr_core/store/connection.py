"""Opening the database file for one burst. The caller holds the lock.

A file of a store may come from anywhere. Whatever its views, macros and names hold, DuckDB reaches
no other file while it is open, unless a user's own query asks for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from agentr_core.store import faults, lock

# A burst that closed with a checkpoint would rewrite the last row group of every table it touched:
# 250 ms a burst at 100,000 nodes. Small row groups make checkpoints cheap, and the size of the log
# decides when there is one. Each open replays the log, at 0.4 ms of processor time for a small
# transaction, so the log is kept short. Below half a megabyte each row would cause a checkpoint,
# since DuckDB counts a row as the space that it reserves for a thousand.
_ROW_GROUP_ROWS = 16_384
_LOG_LIMIT = "1MB"
_RETRY_S = 0.02
# The format of a new file. DuckDB's default is its oldest format, which takes half as long again to
# open and is six times as large without rows; DuckDB has read this one since version 1.2.
_FORMAT = "v1.2.0"
# One thread while the file is opened: more threads take four times the processor time to replay a
# small log. This thread also reads small files: starting and ending the others takes as long as
# opening such a file.
_READING_THREADS = 4
_LARGE_BYTES = 32 << 20
_BESIDE = ("", ".wal", ".wal.checkpoint", ".wal.recovery")
"""The endings of the files that DuckDB itself makes of a database."""


def quoted(name: str) -> str:
    """Return a name as an identifier in SQL, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as a string in SQL."""
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def connected(
    path: Path,
    deadline: float,
    *,
    read_only: bool,
    idle: list[tuple[str, Any]] | None = None,
    files: bool = False,
    beside: Sequence[Path] = (),
) -> Iterator[Any]:
    """Return a connection whose default database is the file at `path`, closed after the body.

    Programs that have the file open without our lock, such as the duckdb shell, are waited for
    until `deadline` (`time.monotonic()`).

    Args:
        path: the database file.
        deadline: when to give up.
        read_only: whether the body only reads.
        idle: instances of DuckDB without a file, from earlier bursts on this path; one is taken and
            given back. Starting an instance costs more than opening the file.
        files: whether the body may read and write any file.
        beside: other database files that the body may attach.

    Raises:
        StoreBusy: such a program kept the file for longer.
        duckdb.Error: the file cannot be opened.
    """
    options = "read_only" if read_only else f"row_group_size {_ROW_GROUP_ROWS}"
    if not (read_only or path.exists()):
        options += f", storage_version '{_FORMAT}'"
    shared = idle if not (files or beside) else None
    # An absolute path: DuckDB takes the text before a first colon for a kind of database.
    name = str(path.absolute())
    instance = _taken(shared, name) or _started(path, () if files else (path, *beside))
    reusable = False
    try:
        _attach(instance, f"attach {literal(name)} as store ({options})", path, deadline)
        # Each burst has a connection of its own, so that nothing but its settings remains.
        with closing(instance.cursor()) as con:
            con.execute("set enable_progress_bar = false; use store.main")
            if read_only and path.stat().st_size >= _LARGE_BYTES:
                con.execute(f"set threads = {_READING_THREADS}")
            yield con
        reusable = shared is not None and _emptied(instance)
    finally:
        if shared is not None and reusable:
            shared.append((name, instance))
        else:
            instance.close()


def _taken(idle: list[tuple[str, Any]] | None, name: str) -> Any:
    # Without checking first whether there is one: another thread may take it meanwhile.
    with suppress(IndexError):
        if idle is not None:
            opens, instance = idle.pop()
            if opens == name:
                return instance
            # The path is relative, and the program has gone to another folder.
            instance.close()
    return None


def _started(path: Path, databases: Sequence[Path]) -> Any:
    """Return a new instance, which opens no files but those databases; any, if there are none."""
    instance = duckdb.connect(
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
    instance.execute("pragma disable_checkpoint_on_shutdown")
    if databases:
        names = (literal(f"{database.absolute()}{ending}") for database in databases for ending in _BESIDE)
        # No statement can take the second one back while the instance runs.
        instance.execute(f"set allowed_paths = [{', '.join(names)}]; set enable_external_access = false")
    return instance


def _emptied(instance: Any) -> bool:
    """Close the file; return whether the instance can open it again. It cannot if a user's query
    has locked its settings.
    """
    try:
        instance.execute("detach store; set threads = 1")
    except duckdb.InvalidInputException:
        return False
    return True


@contextmanager
def storage_faults(path: Path) -> Iterator[None]:
    """Turn DuckDB's errors about the file at `path` into ours, and its end of a query by Ctrl-C
    into `KeyboardInterrupt`; let the others through.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from error
    except duckdb.Error as error:
        fault = faults.storage_fault(error, path)
        if fault is None:
            raise
        raise fault from error


def _attach(con: Any, statement: str, path: Path, deadline: float) -> None:
    wait = lock.Wait(path)
    while True:
        try:
            con.execute(statement)
        except duckdb.Error as error:
            if not faults.held_elsewhere(error):
                raise
            if time.monotonic() >= deadline:
                raise lock.busy(path, faults.holder(error)) from error
            wait.tell(partial(faults.holder, error))
            time.sleep(_RETRY_S)
        else:
            return
