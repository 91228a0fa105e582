"""Answers to SQL queries as text: pure functions from an Arrow table to a table, JSON or CSV,
without loss.

Numbers keep all their digits. Bytes are hexadecimal digits, as `unhex` reads them; times are in ISO
8601.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.writing import write_bytes

_GAP = "  "


def to_json(answer: pa.Table) -> str:
    """Return a JSON array with an object for each row; NaN and infinities, which JSON lacks, are
    strings.
    """
    names = [json.dumps(name) for name in answer.column_names]
    rows = (",".join(f"{name}:{_json(value)}" for name, value in zip(names, row, strict=True)) for row in _rows(answer))
    return f"[{','.join(f'{{{row}}}' for row in rows)}]"


def to_csv(answer: pa.Table) -> str:
    """Return CSV with a header line; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.column_names)
    writer.writerows([_plain(value, none="") for value in row] for row in _rows(answer))
    return text.getvalue()


def to_table(answer: pa.Table) -> str:
    """Return aligned columns under their names; control characters are shown as escapes."""
    rows = [[_visible(_plain(value, none="NULL")) for value in row] for row in _rows(answer)]
    heads = [_visible(name) for name in answer.column_names]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    right = [pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in answer.schema.types]
    lines = [
        _GAP.join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        for row in (heads, *rows)
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def write_parquet(answer: pa.Table, path: Path) -> None:
    """Write an answer to a Parquet file with its types, and make its folder. Raises `DiskError`."""
    rows = io.BytesIO()
    pq.write_table(answer, rows, compression="zstd")
    write_bytes(path, rows.getvalue())


FORMATS: Mapping[str, Callable[[pa.Table], str]] = MappingProxyType(
    {"table": to_table, "json": lambda answer: f"{to_json(answer)}\n", "csv": to_csv}
)
"""The functions that turn an answer into text that ends with a newline, by format."""


def _rows(answer: pa.Table) -> list[Sequence[Any]]:
    columns = [_values(column) for column in answer.columns]
    return list(zip(*columns, strict=True)) if columns else []


def _values(column: Any) -> list[Any]:
    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        # Times beyond the years of Python's calendar.
        found = column.cast(pa.string()).to_pylist()
    return found


def _plain(value: Any, *, none: str) -> str:
    if value is None:
        return none
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, (Mapping, list, tuple)):
        return _json(value)
    return _scalar(value)


def _json(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, int) or (isinstance(value, (float, Decimal)) and math.isfinite(value)):
        return _scalar(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json, value)) + "]"
    return json.dumps(_scalar(value))


def _scalar(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return repr(value) if isinstance(value, float) else str(value)


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
