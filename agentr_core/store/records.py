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

_ARROW_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


@cache
def field_types(record_type: Any) -> Mapping[str, Any]:
    """Return the types of a record's stored fields by name, in the order of the fields. A field
    that is not compared is not stored.
    """
    hints = get_type_hints(record_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(record_type) if field.compare}


@cache
def arrow_type(hint: Any) -> pa.DataType:
    """Return the Arrow type of a column that holds values of type `hint`.

    Raises `TypeError` for a type that no record may have.
    """
    value_type = _without_none(hint)
    if get_origin(value_type) is tuple:
        return pa.list_(arrow_type(get_args(value_type)[0]))
    if _is_record(value_type):
        return pa.struct([(name, arrow_type(field_type)) for name, field_type in field_types(value_type).items()])
    if _is_json(value_type) or get_origin(value_type) is Literal or issubclass(value_type, Enum):
        return pa.string()
    if value_type not in _ARROW_TYPES:
        raise TypeError(f"a column cannot hold {value_type}")
    return _ARROW_TYPES[value_type]


def to_arrow(values: Sequence[Any], hint: Any) -> pa.Array:
    """Return values of type `hint` as an Arrow column."""
    value_type = _without_none(hint)
    if _is_json(value_type):
        return pa.array([None if value is None else canonical(value) for value in values], pa.string())
    if _is_record(value_type):
        is_null = [value is None for value in values]
        children = [
            to_arrow([None if value is None else getattr(value, name) for value in values], field_type)
            for name, field_type in field_types(value_type).items()
        ]
        return pa.StructArray.from_arrays(
            children, fields=list(arrow_type(value_type)), mask=pa.array(is_null, pa.bool_())
        )
    if get_origin(value_type) is tuple and not pa.types.is_primitive(arrow_type(get_args(value_type)[0])):
        flat = to_arrow(
            [field_type for value in values if value is not None for field_type in value], get_args(value_type)[0]
        )
        offsets = list(accumulate((len(value or ()) for value in values), initial=0))
        # A list is null where its start offset is null.
        starts = [None if value is None else start for value, start in zip(values, offsets, strict=False)]
        return pa.ListArray.from_arrays(pa.array([*starts, offsets[-1]], pa.int32()), flat)
    return pa.array(values, arrow_type(value_type))


def from_arrow(array: pa.Array, hint: Any) -> list[Any]:
    """Return the values of an Arrow column as Python objects of type `hint`; the inverse of
    `to_arrow`.
    """
    value_type = _without_none(hint)
    if _is_json(value_type):
        return [None if text is None else json.loads(text) for text in array.to_pylist()]
    if _is_record(value_type):
        if array.null_count:
            present_values = iter(from_arrow(array.drop_null(), value_type))
            return [next(present_values) if valid else None for valid in array.is_valid().to_pylist()]
        names = tuple(field_types(value_type))
        field_values = [
            from_arrow(child, field_type)
            for child, field_type in zip(array.flatten(), field_types(value_type).values(), strict=True)
        ]
        return [value_type(**dict(zip(names, row, strict=True))) for row in zip(*field_values, strict=True)]
    if get_origin(value_type) is tuple:
        flat = from_arrow(array.flatten(), get_args(value_type)[0])
        lengths = array.value_lengths().to_pylist()
        bounds = pairwise(accumulate((length or 0 for length in lengths), initial=0))
        return [
            None if length is None else tuple(flat[start:end])
            for length, (start, end) in zip(lengths, bounds, strict=True)
        ]
    if isinstance(value_type, type) and issubclass(value_type, Enum):
        return [None if text is None else value_type(text) for text in array.to_pylist()]
    return list(array.to_pylist())


def to_arrow_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], hints: Mapping[str, Any]) -> pa.Table:
    """Return the named columns of `rows` as an Arrow table; a column in `hints` has the type given
    there, any other the type that Arrow infers.
    """
    values_by_column = {name: [row[name] for row in rows] for name in columns}
    return pa.table(
        {
            name: to_arrow(values, hints[name]) if name in hints else pa.array(values)
            for name, values in values_by_column.items()
        }
    )


def from_arrow_table(table: pa.Table, hints: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of an Arrow table as tuples; values of a column in `hints` are converted to
    the type given there.
    """
    return zip(
        *(
            [value for chunk in chunked_array.chunks for value in from_arrow(chunk, hints[name])]
            if name in hints
            else chunked_array.to_pylist()
            for name, chunked_array in zip(table.column_names, table.columns, strict=True)
        ),
        strict=True,
    )


@cache
def _without_none(hint: Any) -> Any:
    """Return T for an optional type `T | None`, and any other type unchanged."""
    if get_origin(hint) in (Union, UnionType):
        (value_type,) = (arg for arg in get_args(hint) if arg is not NoneType)
        return value_type
    return hint


def _is_record(value_type: Any) -> bool:
    return isinstance(value_type, type) and dataclasses.is_dataclass(value_type)


@cache
def _is_json(value_type: Any) -> bool:
    origin = get_origin(value_type)
    return value_type is Any or (isinstance(origin, type) and issubclass(origin, Mapping))
