"""Reading files of records: JSONL, one array of objects, a single object, or Parquet. The session
file of a coding agent, which has several lines, is one record.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.errors import DataFileError
from agentr_core.samples.published import with_instance_index
from agentr_core.samples.sessions import agent_of, session_record
from agentr_core.texts import path_for_message, quoted, unreadable_reason

MAX_DIGITS = 1_000
"""The most digits of a whole number that are read: Python refuses to convert very long ones."""


def records(path: Path, *, setting: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSONL file, or of one array of them, each after the number of the line
    in which it begins, from 1; of a Parquet file, whose name must end in .parquet, the rows, each
    after its number, from 1. Blank lines are skipped; a session file is one record, of line 1.

    Parquet has no absent keys: an object in a row has each key that any such object has, null where
    it had none. So keys whose value is null are left out of the objects in a row, such as the
    arguments of a call. The row itself keeps its null columns, as a line of JSON does.

    Args:
        setting: the field of a recipe that names the file, for error messages.

    Raises:
        DataFileError: the file cannot be read, or something in it is not a JSON object.
    """
    for number, entry in records_or_errors(path, setting=setting):
        if isinstance(entry, DataFileError):
            raise entry
        yield number, entry


def records_or_errors(path: Path, *, setting: str) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    """Yield what `records` does, but with the error in place of each object for which `records`
    would raise it, so that the objects after it are read.

    A syntax error in an array ends the iteration. Raises `DataFileError` when the file cannot be
    read.
    """
    is_parquet = path.suffix == ".parquet"
    try:
        if is_parquet:
            batches = pq.ParquetFile(path).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield number, {key: _without_nulls(value) for key, value in row.items()}
            return
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        reason = unreadable_reason(error) if isinstance(error, OSError | UnicodeDecodeError) else str(error)
        raise DataFileError(
            f"file {path_for_message(path)} cannot be read: {reason}; set {setting} to a "
            f"{'Parquet' if is_parquet else 'JSONL'} file"
        ) from error
    for number, entry in _entries(text, path):
        yield number, with_instance_index(entry, path.stem) if isinstance(entry, dict) else entry


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _entries(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    start = text.lstrip()[:1]
    if start == "[":
        yield from _array_entries(text, path)
    elif start == "{" and (agent := agent_of(text)):
        lines = [line for _, line in _line_entries(text, path)]
        faults = [line for line in lines if isinstance(line, DataFileError)]
        yield (
            1,
            faults[0]
            if faults
            else session_record(agent, [line for line in lines if isinstance(line, dict)], path.stem),
        )
    elif start == "{" and text.strip().count("\n") and (single := _one_object(text, path)) is not None:
        yield single
    else:
        yield from _line_entries(text, path)


def _line_entries(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    # Not splitlines(): JSON strings may contain other line separators, such as U+2028, unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            decoder = _Decoder()
            try:
                yield number, decoder.checked_object(decoder.decode(line), path, number)
            except (json.JSONDecodeError, RecursionError) as error:
                yield number, DataFileError(f"{path}:{number} is not JSON ({error}); write one object on each line")


class _Decoder(json.JSONDecoder):
    """Decodes JSON as Python does, and records what would be lost: an integer with more digits than
    `MAX_DIGITS`, or a key that occurs twice in an object.
    """

    def __init__(self) -> None:
        self._faults: list[str] = []
        super().__init__(parse_int=self._parse_int, object_pairs_hook=self._pairs)

    def checked_object(self, value: Any, path: Path, line: int) -> dict[str, Any] | DataFileError:
        """Return the value that was decoded last if it is an object and nothing in it was lost;
        otherwise return an error.
        """
        faults = [*self._faults]
        self._faults.clear()
        if faults:
            return DataFileError(f"{path}:{line} has {faults[0]}; correct the record")
        if isinstance(value, dict):
            return value
        return DataFileError(f"{path}:{line} is a {type(value).__name__}; write one JSON object on each line")

    def _parse_int(self, text: str) -> int:
        if len(text) <= MAX_DIGITS:
            return int(text)
        self._faults.append(f"a number of {len(text):,} digits, and {MAX_DIGITS:,} are the most")
        return 0

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            repeated_key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            self._faults.append(f"the key {quoted(repeated_key, 60)} twice")
        return result


def _array_entries(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    decoder, line, position = _Decoder(), 1, text.index("[")
    line += text.count("\n", 0, position)
    while True:
        begin = _next(text, position + 1)
        line += text.count("\n", position, begin)
        if text[begin : begin + 1] == "]" and text[position] == "[":
            position = begin
            break
        try:
            value, end = decoder.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            yield error.lineno, DataFileError(f"{path}:{error.lineno} is not JSON ({error.msg}); correct the array")
            return
        except RecursionError:
            yield line, DataFileError(f"{path}:{line} is nested too deeply to be a record; correct the array")
            return
        yield line, decoder.checked_object(value, path, line)
        line += text.count("\n", begin, end)
        position = _next(text, end)
        if text[position : position + 1] != ",":
            break
        line += text.count("\n", end, position)
    if text[position:].strip() != "]":
        yield line, DataFileError(f"{path}:{line} is not JSON after its object; end the array with ] and nothing else")


def _one_object(text: str, path: Path) -> tuple[int, dict[str, Any] | DataFileError] | None:
    """Return the line and the object (or its error) of a text that is one JSON object, which may
    span several lines; None if the text is not one JSON value.
    """
    decoder, line = _Decoder(), 1 + text[: text.index("{")].count("\n")
    try:
        return line, decoder.checked_object(decoder.decode(text), path, line)
    except (json.JSONDecodeError, RecursionError):
        return None


def _next(text: str, position: int) -> int:
    """Return the position of the first character from `position` on that is not white space."""
    while text[position : position + 1].isspace():
        position += 1
    return position
