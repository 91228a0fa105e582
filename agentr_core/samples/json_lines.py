"""Files of records, one JSON object a line or all in one array, and the instances they name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agentr_core.errors import DataFileError
from agentr_core.texts import placed, quoted, unreadable
from agentr_core.types import Instance

MOST_DIGITS = 1_000
"""The most digits of a whole number: Python refuses to read or print several thousand."""
_INDEX_DIGITS = 18
"""An index with more digits would not fit the store's integers."""


class World(NamedTuple):
    """The names of a recipe's environment: the one in its instances, and the one in the recipe,
    which a file may use as well.
    """

    name: str
    """Such as `gymnasium-Rooms-v0`."""
    recipe_name: str = ""
    """Such as `gymnasium`; empty where it is the same."""

    def known_as(self, name: str) -> str:
        """Return the name of the environment if `name` is what AgentGym or ETO calls it; else
        `name` as it is.
        """
        own = {known.removeprefix("agentgym-") for known in self}
        return self.name if name in own else name


def records(path: Path, *, setting: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSONL file, or of one array of them, with the numbers of the lines
    they begin in, from 1; blank lines are skipped.

    Args:
        setting: the field of a recipe that names the file, for error messages.

    Raises:
        DataFileError: the file cannot be read, or something in it is not a JSON object.
    """
    for number, found in entries(path, setting=setting):
        if isinstance(found, DataFileError):
            raise found
        yield number, found


def entries(path: Path, *, setting: str) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    """Yield what `records` does, but an error in place of each line or object for which `records`
    raises it.

    An array that is not JSON ends with its error. Raises `DataFileError` when the file cannot be
    read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = unreadable(error)
        raise DataFileError(f"file {placed(path)} cannot be read: {why}; set {setting} to a JSONL file") from error
    start = text.lstrip()[:1]
    if start == "[":
        yield from _of_array(text, path)
    elif start == "{" and text.strip().count("\n") and (whole := _one_object(text, path)) is not None:
        yield whole
    else:
        yield from _of_lines(text, path)


class _Decoder(json.JSONDecoder):
    """Decodes JSON as Python does, and says what it could not keep: a number with more digits than
    Python reads, or a key that an object has twice.
    """

    def __init__(self) -> None:
        self._faults: list[str] = []
        super().__init__(parse_int=self._whole, object_pairs_hook=self._pairs)

    def object_in(self, value: Any, path: Path, line: int) -> dict[str, Any] | DataFileError:
        """Return a value that was just decoded if it is an object with all that was written."""
        faults = [*self._faults]
        self._faults.clear()
        if faults:
            return DataFileError(f"{path}:{line} has {faults[0]}; correct the record")
        if isinstance(value, dict):
            return value
        return DataFileError(f"{path}:{line} is a {type(value).__name__}; write one JSON object on each line")

    def _whole(self, text: str) -> int:
        if len(text) <= MOST_DIGITS:
            return int(text)
        self._faults.append(f"a number of {len(text):,} digits, and {MOST_DIGITS:,} are the most")
        return 0

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            self._faults.append(f"the key {quoted(twice, 60)} twice")
        return made


def _of_lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    # Not splitlines(): JSON strings may hold other line ends, such as U+2028, as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            decoder = _Decoder()
            try:
                yield number, decoder.object_in(decoder.decode(line), path, number)
            except (json.JSONDecodeError, RecursionError) as error:
                yield number, DataFileError(f"{path}:{number} is not JSON ({error}); write one object on each line")


def _of_array(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
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
        yield line, decoder.object_in(value, path, line)
        line += text.count("\n", begin, end)
        position = _next(text, end)
        if text[position : position + 1] != ",":
            break
        line += text.count("\n", end, position)
    if text[position:].strip() != "]":
        yield line, DataFileError(f"{path}:{line} is not JSON after its object; end the array with ] and nothing else")


def _one_object(text: str, path: Path) -> tuple[int, dict[str, Any] | DataFileError] | None:
    """Return the line and the object of a text that is one JSON value over several lines; None for
    any other text.
    """
    decoder, line = _Decoder(), 1 + text[: text.index("{")].count("\n")
    try:
        return line, decoder.object_in(decoder.decode(text), path, line)
    except (json.JSONDecodeError, RecursionError):
        return None


def _next(text: str, position: int) -> int:
    """Return the position of the next character that is not a space."""
    while text[position : position + 1].isspace():
        position += 1
    return position


def instance_of(record: dict[str, Any], where: str, *, world: World, split: str) -> Instance:
    """Return the instance that `instance_id`, `item_id` or `id` names: an index of the given split,
    one after the name of the environment as in `textcraft_12`, or `environment/split/index`.

    Raises `DataFileError` if the id has none of these forms, or names another environment.
    """
    named = _name_of_instance(record)
    # Split from the right: the name of a world of Gymnasium may have a slash.
    parts = str(named).rsplit("/", 2)
    if len(parts) == 1:
        # AgentGym and ETO write `textcraft_12`.
        name, mark, number = parts[0].rpartition("_")
        parts = [world.known_as(name), split, number] if mark else [world.name, split, number]
    if isinstance(named, bool) or len(parts) != 3 or not _is_index(parts[2]):
        raise DataFileError(
            f"{where}: id is {named!r}; give the index of an instance of split {split}, or environment/split/index"
        )
    if parts[0] not in world:
        raise DataFileError(f"{where}: id {named!r} is of environment {parts[0]}, but the recipe's is {world.name}")
    return Instance(environment=world.name, split=parts[1], index=int(parts[2]))


def number_of(record: dict[str, Any], key: str, where: str) -> float | None:
    """Return the reward in [0, 1] under a key; None if it is missing or null. Raises
    `DataFileError`.
    """
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataFileError(f"{where}: {key} is {value!r}; it must be a number from 0 to 1")
    return float(value)


def _name_of_instance(record: dict[str, Any]) -> Any:
    extra = record.get("extra")
    for source in (record, extra if isinstance(extra, dict) else {}):
        whole = source.get("instance_id")
        if isinstance(whole, str) and whole.count("/") >= 2:
            return whole
    return record.get("item_id", record.get("id"))


def _is_index(text: str) -> bool:
    return text.isdecimal() and len(text) <= _INDEX_DIGITS
