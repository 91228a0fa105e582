"""Conversion of dataclass records to Arrow columns, which DuckDB reads and writes, and back.

A field is a column under its own name. In it a nested record is a struct, a tuple a list, an
enumeration or a literal text, and a mapping the text of its JSON; None is null. No record has code
of its own here: a new field of a record needs a migration only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from agentr_core.fingerprint import canonical

_PLAIN = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


@cache
def fields_of(kind: Any) -> Mapping[str, Any]:
    """Return the types of a record's fields by name, in the order of the fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def arrow_type(hint: Any) -> pa.DataType:
    """Return the Arrow type of a column that holds values of type `hint`.

    Raises `TypeError` for a type that no record may have.
    """
    kind = _kind(hint)
    if get_origin(kind) is tuple:
        return pa.list_(arrow_type(get_args(kind)[0]))
    if _is_record(kind):
        return pa.struct([(name, arrow_type(part)) for name, part in fields_of(kind).items()])
    if _is_json(kind) or get_origin(kind) is Literal or issubclass(kind, Enum):
        return pa.string()
    if kind not in _PLAIN:
        raise TypeError(f"a column cannot hold {kind}")
    return _PLAIN[kind]


def column(values: Sequence[Any], hint: Any) -> pa.Array:
    """Return values of type `hint` as an Arrow column."""
    kind = _kind(hint)
    if _is_json(kind):
        return pa.array([None if value is None else canonical(value) for value in values], pa.string())
    if _is_record(kind):
        missing = [value is None for value in values]
        parts = [
            column([None if value is None else getattr(value, name) for value in values], part)
            for name, part in fields_of(kind).items()
        ]
        return pa.StructArray.from_arrays(parts, fields=list(arrow_type(kind)), mask=pa.array(missing, pa.bool_()))
    if get_origin(kind) is tuple and not pa.types.is_primitive(arrow_type(get_args(kind)[0])):
        flat = column([part for value in values if value is not None for part in value], get_args(kind)[0])
        ends = list(accumulate((len(value or ()) for value in values), initial=0))
        # A list is null where its start offset is null.
        starts = [None if value is None else start for value, start in zip(values, ends, strict=False)]
        return pa.ListArray.from_arrays(pa.array([*starts, ends[-1]], pa.int32()), flat)
    return pa.array(values, arrow_type(kind))


def values(array: pa.Array, hint: Any) -> list[Any]:
    """Return the values of an Arrow column as Python objects of type `hint`; the inverse of
    `column`.
    """
    kind = _kind(hint)
    if _is_json(kind):
        return [None if text is None else json.loads(text) for text in array.to_pylist()]
    if _is_record(kind):
        if array.null_count:
            present = iter(values(array.drop_null(), kind))
            return [next(present) if valid else None for valid in array.is_valid().to_pylist()]
        names = tuple(fields_of(kind))
        parts = [values(part, of) for part, of in zip(array.flatten(), fields_of(kind).values(), strict=True)]
        return [kind(**dict(zip(names, row, strict=True))) for row in zip(*parts, strict=True)]
    if get_origin(kind) is tuple:
        flat = values(array.flatten(), get_args(kind)[0])
        lengths = array.value_lengths().to_pylist()
        cuts = pairwise(accumulate((length or 0 for length in lengths), initial=0))
        return [
            None if length is None else tuple(flat[start:end])
            for length, (start, end) in zip(lengths, cuts, strict=True)
        ]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [None if text is None else kind(text) for text in array.to_pylist()]
    return list(array.to_pylist())


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], hints: Mapping[str, Any]) -> pa.Table:
    """Return the named columns of `rows` as an Arrow table; a column in `hints` has the type given
    there, any other the type that Arrow infers.
    """
    data = {name: [row[name] for row in rows] for name in columns}
    return pa.table({name: column(of, hints[name]) if name in hints else pa.array(of) for name, of in data.items()})


def rows_of(table: pa.Table, hints: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of an Arrow table as tuples; values of a column in `hints` are converted to
    the type given there.
    """
    return zip(
        *(
            [value for chunk in chunked_array.chunks for value in values(chunk, hints[name])]
            if name in hints
            else chunked_array.to_pylist()
            for name, chunked_array in zip(table.column_names, table.columns, strict=True)
        ),
        strict=True,
    )


@cache
def _kind(hint: Any) -> Any:
    """Return T for an optional type `T | None`, and any other type unchanged."""
    if get_origin(hint) in (Union, UnionType):
        (kind,) = (part for part in get_args(hint) if part is not NoneType)
        return kind
    return hint


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def _is_json(kind: Any) -> bool:
    origin = get_origin(kind)
    return kind is Any or (isinstance(origin, type) and issubclass(origin, Mapping))
