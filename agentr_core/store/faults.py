"""The meaning of DuckDB's errors: pure functions from its exceptions to ours."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb

from agentr_core.errors import ConfigError, CorruptStore, StoreError

_DAMAGE = (
    "not a valid DuckDB database file",
    "Corrupt database file",
    "checksum",
    "Could not read enough bytes",
    "Failure while replaying WAL",
    "Corrupt WAL",
)
_BROKEN = (duckdb.FatalException, duckdb.InternalException)
_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
_HELD = ("Could not set lock on file", "Unique file handle conflict")


def held_elsewhere(error: duckdb.Error) -> bool:
    """Return whether a database could not be opened because a program that does not know our lock
    has it open.
    """
    return any(text in str(error) for text in _HELD)


def holder(error: duckdb.Error) -> int | None:
    """Return the PID in DuckDB's message about a database that is open elsewhere, or None."""
    found = re.search(r"PID (\d+)", str(error))
    return int(found[1]) if found else None


def storage_fault(error: duckdb.Error, path: Path) -> StoreError | None:
    """Return the error of the file at `path` or its disk, or None when DuckDB's error is about
    something else.
    """
    text = " ".join(str(error).split())
    if any(sign in text for sign in _FULL):
        return StoreError(
            f"{path} cannot grow ({_cause(text)}); free some disk space and run again, nothing stored is lost"
        )
    if any(sign in text for sign in _DAMAGE) or isinstance(error, duckdb.SerializationException):
        return CorruptStore(
            f"{path} is damaged or no DuckDB file ({_cause(text)}); it was left as it is: move it away together with "
            f"{path.name}.wal and put a copy in its place, or start with a new workspace"
        )
    if isinstance(error, (duckdb.IOException, duckdb.PermissionException, *_BROKEN)):
        return StoreError(f"{path} cannot be used ({_cause(text)}); check the file, its permissions and its disk")
    return None


def query_fault(error: duckdb.Error, path: Path) -> ConfigError | StoreError:
    """Return the error in a user's SQL, in one sentence, or of the file at `path` that it reads."""
    text = " ".join(str(error).split())
    if "read-only mode" in text:
        return ConfigError("SQL: the store is opened for reading only; use a SELECT")
    if any(sign in text for sign in (*_FULL, *_DAMAGE)) or isinstance(error, _BROKEN):
        fault = storage_fault(error, path)
        if fault is not None:
            return fault
    if isinstance(error, duckdb.OutOfMemoryException):
        return ConfigError(
            f"SQL: the query needs more memory than there is ({_cause(text)}); select fewer rows or columns"
        )
    # The excerpt with the caret is cut off: it needs several lines to make sense.
    message = re.split(r"\s*LINE \d+:", text)[0].rstrip(".! ")
    unknown = isinstance(error, duckdb.CatalogException | duckdb.BinderException)
    hint = "; `select table_name, comment from duckdb_tables()` and duckdb_views() show what there is"
    return ConfigError(f"SQL: {message}{hint if unknown else ''}")


def _cause(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
