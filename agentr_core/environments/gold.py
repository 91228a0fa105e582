"""Files of gold answers: for each instance the right answers, or replies that solve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.chat_file import World, instance_of
from agentr_core.samples.record_files import records
from agentr_core.types import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """The gold answers of an instance: `answers`, each of which is right on its own, or `replies`
    of a whole episode, which may be followed by the first answer.
    """

    answers: tuple[str, ...] = ()
    replies: tuple[str, ...] = ()


def read_gold(path: Path, *, world: str, split: str = "train", setting: str = "--gold") -> dict[Instance, Gold]:
    """Return the gold answers of a file of JSON lines, by instance.

    Each object names its instance in `id`, by a key such as `textcraft/train/7` or by its index in
    `split`. It has `answer` (a text, a number, or a list of these), `replies` (a list of texts: the
    replies of a whole episode that solves the instance), or both.

    Args:
        world: the environment's name in the keys of its instances.
        setting: the option that names the file, for error messages.

    Raises `DataFileError` for a file that cannot be read or has no objects, an object with neither
    an answer nor replies, and an instance that occurs twice.
    """
    gold_by_instance: dict[Instance, Gold] = {}
    for line_number, record in records(path, setting=setting):
        location = f"{path}:{line_number}"
        instance = instance_of(record, location, world=World(world), split=split)
        gold = Gold(answers=_texts(record, "answer", location), replies=_texts(record, "replies", location))
        if not (gold.answers or gold.replies):
            raise DataFileError(f"{location}: there is neither answer nor replies; give one of them")
        if instance in gold_by_instance:
            raise DataFileError(f"{location}: {instance.key} is there twice; give all its answers in one list")
        gold_by_instance[instance] = gold
    if not gold_by_instance:
        raise DataFileError(f"{path} has no gold answers; write one JSON object on each line")
    return gold_by_instance


def _texts(record: Mapping[str, Any], key: str, location: str) -> tuple[str, ...]:
    value = record.get(key, [])
    texts = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, str | int | float) or not str(item).strip():
            raise DataFileError(f"{location}: {key} has {item!r}; it must be a text or a number, or a list of them")
        texts.append(str(item))
    return tuple(texts)
