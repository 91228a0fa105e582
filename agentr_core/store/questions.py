"""A user's queries in SQL: which statements they may have, and their answers without loss."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.errors import ConfigError
from agentr_core.store.connection import quoted
from agentr_core.system import write_bytes

DEFAULT_TIME_LIMIT_S = 300.0
"""The default time limit of a user's query: writers wait while it reads."""
_QUERY_KINDS = ("SELECT", "EXPLAIN")
_FILE_KINDS = ("COPY", "EXPORT", "ATTACH", "DETACH", "LOAD", "CREATE")
"""Kinds of statements that use other files, or are of use only with statements that do."""
_DESCRIBE = re.compile(r"\s*desc(?:ribe)?\s+(\w+)\s*;?\s*", re.IGNORECASE)
# DuckDB's own answer leaves the comments out. A view's column is called as in the table below it.
_COLUMNS = """
with shared as (
    select column_name, min(c.comment) as comment
    from duckdb_columns() c join duckdb_tables() t using (database_name, schema_name, table_name)
    where c.database_name = current_database()
    group by all having count(distinct c.comment) = 1
)
select c.column_name, c.data_type as column_type, coalesce(c.comment, s.comment, '') as what
from duckdb_columns() c left join shared s using (column_name)
where c.database_name = current_database() and c.schema_name = 'main' and lower(c.table_name) = ?
order by c.column_index"""
_TYPES_SHOWN_AS_TEXT = ("INTERVAL", "UNION", "UHUGEINT", "BIGNUM", "VARINT", "BIT", "TIME WITH TIME ZONE", "TIMETZ")
"""Types that neither Arrow nor pandas has; their text in SQL loses nothing."""


def run_query(
    con: Any, sql: str, params: Sequence[Any] | Mapping[str, Any], store_path: Path, *, allow_files: bool = False
) -> pa.Table | None:
    """Return the answer of the last statement in `sql`, or None if there is no statement.

    Column names are made distinct, such as `a` and `a_1`. The settings of the connection stay
    locked.

    Args:
        allow_files: whether the connection reaches other files, so that statements may name them.

    Raises:
        ConfigError: a statement does more than query, or there are several queries.
        duckdb.Error: the SQL is wrong.
    """
    try:
        sql.encode()
    except UnicodeEncodeError:
        raise ConfigError("SQL: the question is not UTF-8; write it so") from None
    statements = con.extract_statements(sql)
    if not statements:
        return None
    _check_statements(statements, store_path, allow_files=allow_files)
    con.execute("set lock_configuration = true")
    if (match := _DESCRIBE.fullmatch(sql)) and (columns := con.sql(_COLUMNS, params=[match[1].lower()])):
        return columns.to_arrow_table()
    if statements[-1].type.name not in _QUERY_KINDS:
        return con.execute(sql, params).to_arrow_table()
    relation = con.sql(sql, params=params or None)
    # A repeated name gets the first number that makes it unique.
    originals, names = set(relation.columns), list[str]()
    for name in relation.columns:
        unique_name, number = name, 0
        while unique_name in names or (number and unique_name in originals):
            number += 1
            unique_name = f"{name}_{number}"
        names.append(unique_name)
    columns = []
    for position, (name, column_type) in enumerate(zip(names, relation.types, strict=True), start=1):
        is_lossy = any(type_name in str(column_type) for type_name in _TYPES_SHOWN_AS_TEXT)
        columns.append(f"{f'cast(#{position} as varchar)' if is_lossy else f'#{position}'} as {quoted(name)}")
    return relation.project(", ".join(columns)).to_arrow_table()


@contextmanager
def time_limit(con: Any, seconds: float) -> Iterator[None]:
    """Interrupt the connection's query once the body has taken `seconds`. Raises `ConfigError`
    then.
    """
    finished, timed_out = threading.Event(), threading.Event()

    def interrupt_when_late() -> None:
        if not finished.wait(min(seconds, threading.TIMEOUT_MAX)):
            timed_out.set()
            # An interrupt between two statements has no effect.
            while not finished.wait(0.05):
                con.interrupt()

    watchdog = threading.Thread(target=interrupt_when_late, name="time limit of a query", daemon=True)
    watchdog.start()
    try:
        yield
    except duckdb.InterruptException as error:
        if not timed_out.is_set():
            raise
        raise ConfigError(
            f"SQL: the query was stopped after {seconds:g} seconds, its time limit; ask for less, give it more with "
            "--seconds N (Python: seconds=N), or ask a copy that `agentr store backup FILE` makes"
        ) from error
    finally:
        finished.set()
        watchdog.join()


def _check_statements(statements: Sequence[Any], store_path: Path, *, allow_files: bool) -> None:
    if sum(statement.type.name in _QUERY_KINDS for statement in statements) > 1:
        raise ConfigError("SQL: these are several queries, and only one can be answered; ask them one by one")
    for statement in statements:
        kind = statement.type.name
        # The statement with all quoted texts emptied.
        masked_query = re.sub(r"""'(?:[^']|'')*'|"(?:[^"]|"")*\"""", lambda match: match[0][0] * 2, statement.query)
        if kind not in _FILE_KINDS and not (kind == "EXPLAIN" and _FILE_KEYWORD.search(masked_query)):
            if kind not in _QUERY_KINDS:
                raise _not_a_query_error(kind)
            continue
        if not allow_files:
            raise ConfigError(f"SQL: {_NO_FILE_ACCESS}") if "''" in masked_query else _not_a_query_error(kind)
        # The statement may write: targets may not be the store's files or their folders, and must
        # be names that can be read here.
        if _OTHER_STRING_SYNTAX.search(masked_query) or any(
            not masked_query[match.end() :].lstrip().startswith("''") for match in _TO_KEYWORD.finditer(masked_query)
        ):
            raise ConfigError("SQL: a file is named by one string in single quotes; write it so")
        for file_name in re.findall(r"'((?:[^']|'')*)'", statement.query):
            path = (
                Path(re.sub(r"^file:(//(localhost)?(?=/))?", "", file_name.replace("''", "'"))).expanduser().resolve()
            )
            if path in (store_path.parent.resolve(), *store_path.parent.resolve().parents) or (
                path.parent == store_path.parent.resolve() and path.name.startswith(store_path.name)
            ):
                raise ConfigError(f"SQL: {store_path} is the store itself, which is only read; name another file")


def _not_a_query_error(kind: str) -> ConfigError:
    return ConfigError(f"SQL: the store is opened for reading only, and {kind} is not a query; use a SELECT")


_TO_KEYWORD = re.compile(r"\bto\b", re.IGNORECASE)
_OTHER_STRING_SYNTAX = re.compile(r"\$\w*\$|\be''|--|/\*", re.IGNORECASE)
"""Other notations for strings, and comments, which can hide a string."""
_FILE_KEYWORD = re.compile(r"\b(copy|export|attach|load|create)\b", re.IGNORECASE)
_NO_FILE_ACCESS = (
    "files are neither read nor written; add --files to `agentr sql`, or files=True to `Store.query`, to open them"
)


def as_file_access_error(error: duckdb.Error) -> ConfigError | None:
    """Return the error for a user whose query tried to use a file that it may not use; None if
    DuckDB's error is another one.
    """
    if isinstance(error, duckdb.PermissionException) and "disabled" in str(error):
        match = re.search(r'"([^"]*)"', str(error))
        return ConfigError(f"SQL: {f'{match[1]} is a file, and ' if match else ''}{_NO_FILE_ACCESS}")
    return None


# Example queries in SQL, by name.

_EXAMPLE_HEADER = re.compile(r"^-- ([a-z][a-z-]*): (.+)\n", re.M)


class Example(NamedTuple):
    """A query, with one sentence about what it shows."""

    about: str
    sql: str


def examples() -> dict[str, Example]:
    """Return the queries of `examples.sql` by name, in their order."""
    text = resources.files("agentr_core.store").joinpath("examples.sql").read_text(encoding="utf-8")
    _, *parts = _EXAMPLE_HEADER.split(text)
    names, abouts, queries = parts[::3], parts[1::3], parts[2::3]
    return {name: Example(about, sql.strip()) for name, about, sql in zip(names, abouts, queries, strict=True)}


def example(name: str) -> Example:
    """Return a query by its name. Raises `ConfigError` for an unknown one."""
    by_name = examples()
    if name not in by_name:
        raise ConfigError(f"there is no example {name}; there are {', '.join(by_name)}")
    return by_name[name]


# Answers to SQL queries as text: pure functions from an Arrow table to a table, or, without loss,
# to JSON or CSV.
#
# Numbers keep all their digits, except that a table shows three decimals. Bytes are hexadecimal
# digits, as `unhex` reads them; times are in
# ISO 8601.

_GAP = "  "


def to_json(answer: pa.Table) -> str:
    """Return a JSON array with an object for each row; NaN and infinities, which JSON lacks, are
    strings.
    """
    names = [json.dumps(name) for name in answer.column_names]
    rows = (
        ",".join(f"{name}:{_json_text(value)}" for name, value in zip(names, row, strict=True)) for row in _rows(answer)
    )
    return f"[{','.join(f'{{{row}}}' for row in rows)}]"


def to_csv(answer: pa.Table) -> str:
    """Return CSV with a header line; a missing value is an empty field."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(answer.column_names)
    writer.writerows([_cell_text(value, null_text="") for value in row] for row in _rows(answer))
    return buffer.getvalue()


def to_table(answer: pa.Table) -> str:
    """Return aligned columns under their names, as lines of text; control characters are shown as
    escapes. Floats have three decimals or, below a thousandth, three significant digits.
    """
    rows = [[_escape_controls(_table_cell(value)) for value in row] for row in _rows(answer)]
    headers = [_escape_controls(name) for name in answer.column_names]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    right_aligned = [
        pa.types.is_integer(column_type) or pa.types.is_floating(column_type) for column_type in answer.schema.types
    ]
    lines = [
        _GAP.join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right_aligned, strict=True))
        for row in (headers, *rows)
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def write_parquet(answer: pa.Table, path: Path) -> None:
    """Write an answer to a Parquet file with its types, and make its folder. Raises `DiskError`."""
    buffer = io.BytesIO()
    pq.write_table(answer, buffer, compression="zstd")
    write_bytes(path, buffer.getvalue())


FORMATTERS: Mapping[str, Callable[[pa.Table], str]] = MappingProxyType(
    {"table": to_table, "json": lambda answer: f"{to_json(answer)}\n", "csv": to_csv}
)
"""The functions that turn an answer into text that ends with a newline, by format."""


def _rows(answer: pa.Table) -> list[Sequence[Any]]:
    columns = []
    for column in answer.columns:
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError):
            # Times beyond the years of Python's calendar.
            columns.append(column.cast(pa.string()).to_pylist())
    return list(zip(*columns, strict=True)) if columns else []


def _table_cell(value: Any) -> str:
    # A float of this size has no exact decimals.
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) >= 1e15:
        return _cell_text(value, null_text="NULL")
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.3f}"


def _cell_text(value: Any, *, null_text: str) -> str:
    if value is None:
        return null_text
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, (Mapping, list, tuple)):
        return _json_text(value)
    return _scalar_text(value)


def _json_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, int) or (isinstance(value, (float, Decimal)) and math.isfinite(value)):
        return _scalar_text(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_json_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json_text, value)) + "]"
    return json.dumps(_scalar_text(value))


def _scalar_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return repr(value) if isinstance(value, float) else str(value)


def _escape_controls(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
