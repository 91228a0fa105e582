"""Opening the database file. The caller holds the lock.

A file of a store may come from anywhere. Whatever its views, macros and names hold, DuckDB reaches
no other file while it is open, unless a user's own query asks for that.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from agentr_core.errors import ConfigError, CorruptStore, StoreError
from agentr_core.store import lock
from agentr_core.store.lock import holder_pid_by_inode

# The runs that a process is working on. A killed process could not record its end, so what a store
# says of its runs is not enough.

LOCK_FOLDER = "locks"
"""The folder of a workspace with a file for each run, locked while a process works on it."""


def set_runs_at_work(con: Any, workspace: Path) -> None:
    """Set the variable that tells view v_runs which runs a process of this machine is working on;
    it stays unset if the kernel does not list its locks.
    """
    lock_folder = workspace / LOCK_FOLDER
    try:
        locked_inodes = holder_pid_by_inode()
        run_ids = (
            [file.name for file in lock_folder.iterdir() if file.stat().st_ino in locked_inodes]
            if lock_folder.exists()
            else []
        )
    except OSError:
        return
    con.execute("set variable runs_at_work = ?::varchar[]", [run_ids])


# The meaning of DuckDB's errors: pure functions from its exceptions to ours.

_DAMAGE_MESSAGES = (
    "not a valid DuckDB database file",
    "Corrupt database file",
    "checksum",
    "Could not read enough bytes",
    "Failure while replaying WAL",
    "Corrupt WAL",
)
_FATAL_ERRORS = (duckdb.FatalException, duckdb.InternalException)
_DISK_FULL_MESSAGES = ("No space left on device", "File too large", "Disk quota exceeded")
_LOCKED_MESSAGES = ("Could not set lock on file", "Unique file handle conflict")


def holder_pid(error: duckdb.Error) -> int | None:
    """Return the PID of the process that has the database open, from DuckDB's error message; None
    if it names none.
    """
    match = re.search(r"PID (\d+)", str(error))
    return int(match[1]) if match else None


def as_store_error(error: duckdb.Error, path: Path) -> StoreError | None:
    """Return our error for a DuckDB error about the file at `path` or its disk; None if it is about
    something else.
    """
    text = " ".join(str(error).split())
    if any(message in text for message in _DISK_FULL_MESSAGES):
        return StoreError(
            f"{path} cannot grow ({_brief(text)}); free some disk space and run again, nothing stored is lost"
        )
    if any(message in text for message in _DAMAGE_MESSAGES) or isinstance(error, duckdb.SerializationException):
        return CorruptStore(
            f"{path} is damaged or no DuckDB file ({_brief(text)}); it was left as it is: move it away together with "
            f"{path.name}.wal and put a copy in its place, or start with a new workspace"
        )
    if isinstance(error, (duckdb.IOException, duckdb.PermissionException, *_FATAL_ERRORS)):
        return StoreError(f"{path} cannot be used ({_brief(text)}); check the file, its permissions and its disk")
    return None


def as_query_error(error: duckdb.Error, path: Path) -> ConfigError | StoreError:
    """Return our error for a DuckDB error in a user's query: one sentence on the SQL, or on the
    file at `path` if that is at fault.
    """
    text = " ".join(str(error).split())
    if "read-only mode" in text:
        return ConfigError("SQL: the store is opened for reading only; use a SELECT")
    if any(part in text for part in (*_DISK_FULL_MESSAGES, *_DAMAGE_MESSAGES)) or isinstance(error, _FATAL_ERRORS):
        store_error = as_store_error(error, path)
        if store_error is not None:
            return store_error
    if isinstance(error, duckdb.OutOfMemoryException):
        return ConfigError(
            f"SQL: the query needs more memory than there is ({_brief(text)}); select fewer rows or columns"
        )
    # The excerpt with the caret is cut off: it needs several lines to make sense.
    message = re.split(r"\s*LINE \d+:", text)[0].rstrip(".! ")
    is_unknown_name = isinstance(error, duckdb.CatalogException | duckdb.BinderException)
    hint = "; `select table_name, comment from duckdb_tables()` and duckdb_views() show what there is"
    return ConfigError(f"SQL: {message}{hint if is_unknown_name else ''}")


def _brief(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


# A burst that closed with a checkpoint would rewrite the last row group of every table it touched:
# 250 ms a burst at 100,000 nodes. Small row groups make checkpoints cheap, and the size of the log
# decides when there is one. Each open replays the log, at 0.4 ms of processor time for a small
# transaction, so the log is kept short. Below half a megabyte each row would cause a checkpoint,
# since DuckDB counts a row as the space that it reserves for a thousand.
_ROW_GROUP_ROWS = 4_096
_LOG_LIMIT = "1MB"
_RETRY_S = 0.02
# The format of a new file. DuckDB's default is its oldest format, which takes half as long again to
# open and is six times as large without rows; DuckDB has read this one since version 1.2.
_STORAGE_VERSION = "v1.2.0"
# One thread while the file is opened: more threads take four times the processor time to replay a
# small log. This thread also answers our own queries: on a store of a million steps four threads
# take twice the processor time, and on two cores longer, too. A user's query may be of any kind.
_QUERY_THREADS = 4
_LARGE_FILE_BYTES = 32 << 20
_FILE_SUFFIXES = ("", ".wal", ".wal.checkpoint", ".wal.recovery")
"""The endings of the files that DuckDB itself makes of a database."""


def quoted(name: str) -> str:
    """Return a name as an identifier in SQL, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as a string in SQL."""
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def open_connection(
    path: Path, deadline: float, *, read_only: bool, other_databases: Sequence[Path] = ()
) -> Iterator[Any]:
    """Yield a connection whose default database is the file at `path`, closed after the body.

    Arguments and errors are those of `open_instance`.
    """
    with (
        open_instance(path, deadline, read_only=read_only, other_databases=other_databases) as instance,
        cursor(instance, path) as con,
    ):
        yield con


@contextmanager
def cursor(instance: Any, path: Path, *, internal: bool = True) -> Iterator[Any]:
    """Yield a connection to a DuckDB instance from `open_instance`, with the file at `path` as its
    default database. It is closed after the body; only global settings that it made remain.

    Args:
        internal: whether the queries are the store's own; those of users get more threads for a
            large file.
    """
    with closing(instance.cursor()) as con:
        con.execute("set enable_progress_bar = false; use store.main")
        if not internal and path.stat().st_size >= _LARGE_FILE_BYTES:
            con.execute(f"set threads = {_QUERY_THREADS}")
        yield con


@contextmanager
def open_instance(
    path: Path,
    deadline: float,
    *,
    read_only: bool,
    idle_instances: list[tuple[str, Any]] | None = None,
    allow_files: bool = False,
    other_databases: Sequence[Path] = (),
) -> Iterator[Any]:
    """Yield an instance of DuckDB that has the file at `path` open, until the body ends.

    Programs that have the file open without our lock, such as the duckdb shell, are waited for
    until `deadline` (`time.monotonic()`).

    Args:
        path: the database file.
        deadline: when to give up.
        read_only: whether the body only reads.
        idle_instances: instances of DuckDB without a file, from earlier bursts on this path; one is
            taken and given back. Starting an instance costs more than opening the file.
        allow_files: whether the body may read and write any file.
        other_databases: other database files that the body may attach.

    Raises:
        StoreBusy: such a program kept the file open beyond `deadline`.
        duckdb.Error: the file cannot be opened.
    """
    options = "read_only" if read_only else f"row_group_size {_ROW_GROUP_ROWS}"
    if not (read_only or path.exists()):
        options += f", storage_version '{_STORAGE_VERSION}'"
    pool = idle_instances if not (allow_files or other_databases) else None
    # An absolute path: DuckDB takes the text before a first colon for a kind of database.
    absolute_path = str(path.absolute())
    instance = _pop_instance(pool, absolute_path) or _new_instance(
        path, () if allow_files else (path, *other_databases)
    )
    reusable = False
    try:
        _attach(instance, f"attach {literal(absolute_path)} as store ({options})", path, deadline)
        yield instance
        reusable = pool is not None and _detach(instance)
    finally:
        if pool is not None and reusable:
            pool.append((absolute_path, instance))
        else:
            instance.close()


def _pop_instance(idle_instances: list[tuple[str, Any]] | None, absolute_path: str) -> Any:
    # Without checking first whether there is one: another thread may take it meanwhile.
    with suppress(IndexError):
        if idle_instances is not None:
            instance_path, instance = idle_instances.pop()
            if instance_path == absolute_path:
                return instance
            # The path is relative, and the program has gone to another folder.
            instance.close()
    return None


def _new_instance(path: Path, databases: Sequence[Path]) -> Any:
    """Return a new instance that may open only the files of `databases`; any file if empty."""
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
        allowed_paths = (
            literal(f"{database.absolute()}{suffix}") for database in databases for suffix in _FILE_SUFFIXES
        )
        # No statement can take the second one back while the instance runs.
        instance.execute(f"set allowed_paths = [{', '.join(allowed_paths)}]; set enable_external_access = false")
    return instance


def _detach(instance: Any) -> bool:
    """Detach the file; return whether the instance can be reused, which is not so if a user's query
    has locked its settings.
    """
    try:
        instance.execute("detach store; set threads = 1")
    except duckdb.InvalidInputException:
        return False
    return True


@contextmanager
def raise_store_errors(path: Path) -> Iterator[None]:
    """Turn DuckDB's errors about the file at `path` into `StoreError` or `CorruptStore`, and a
    query interrupted by Ctrl-C into `KeyboardInterrupt`; pass all others on.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from error
    except duckdb.Error as error:
        store_error = as_store_error(error, path)
        if store_error is None:
            raise
        raise store_error from error


def _attach(con: Any, statement: str, path: Path, deadline: float) -> None:
    wait = lock.Wait(path)
    while True:
        try:
            con.execute(statement)
        except duckdb.Error as error:
            # Held: a program that does not know our lock has it open.
            if not any(message in str(error) for message in _LOCKED_MESSAGES):
                raise
            if time.monotonic() >= deadline:
                raise lock.busy_error(path, holder_pid(error)) from error
            wait.warn_if_due(partial(holder_pid, error))
            time.sleep(_RETRY_S)
        else:
            return
