"""The instances of a split, from ranges or from an AgentGym data file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.texts import placed

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_ITEM = re.compile(r".*_(\d+)")


def read_ids(given: str, what: str) -> Sequence[int]:
    """Return the numbers of instances in order, from ranges such as "0-99,120" or a JSON file with
    the field "item_id".

    `what` names the option in an error. Raises `ConfigError` for ranges that overlap or run
    backwards, and `DataFileError` for a file that is missing, malformed, empty, or has an instance
    twice.
    """
    if names_file(given):
        return _file(Path(given), what)
    spaceless = str(given).replace(" ", "")
    ids: list[int] = []
    for part in spaceless.split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise ConfigError(f"{what}: the range {part} runs backwards")
        ids += range(int(first), int(last or first) + 1)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{what}: the ranges {given} overlap")
    return ids


def names_file(given: str) -> bool:
    """Return whether an option is the path of a data file; if not, it is empty or has ranges."""
    spaceless = str(given).replace(" ", "")
    return bool(spaceless) and not _RANGES.fullmatch(spaceless)


def check_apart(train: Sequence[int], test: Sequence[int], what: str) -> None:
    """Raise `ConfigError` if an instance is in both splits."""
    if both := set(train) & set(test):
        raise ConfigError(f"{what}: instance {min(both)} is in both train and test ({len(both)} are)")


def _file(path: Path, what: str) -> Sequence[int]:
    try:
        items = [entry["item_id"] for entry in json.loads(path.read_text(encoding="utf-8"))]
        ids = [int(found[1]) for item in items if (found := _ITEM.fullmatch(item))]
    except FileNotFoundError:
        raise DataFileError(
            f"{what}: {placed(path)} is neither ranges such as 0-99,120 nor a file that exists"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataFileError(
            f"{what}: {path} is not a data file of AgentGym ({type(error).__name__}: {error})"
        ) from error
    if not ids or len(set(ids)) != len(items):
        raise DataFileError(
            f"{what}: {path} must have each instance once, as an item_id such as webshop_12; of {len(items)} items "
            f"{len(set(ids))} are that"
        )
    return ids
