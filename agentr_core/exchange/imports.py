"""The import of files of other programs, or folders of them, record by record into the one form
that recipes take.

The files are JSON lines or one array: conversations of AgentTraj, ETO or ShareGPT, turns of OpenAI,
or trajectories in ATIF; for pairs, the formats that TRL and `agentr export` write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples import chat_file, pairs_file
from agentr_core.samples.expert_file import Demonstration, check_other, demonstration
from agentr_core.samples.json_lines import World, conversation, entries
from agentr_core.types import Instance, Message

EXPERT, PAIRS, GENERAL = "eto.expert.file", "eto.preferences.file", "data.general.file"
"""The fields of a recipe that take these files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The world and split that the instances of a file belong to. `known` are the existing
    instances, None if these are not known.
    """

    world: World
    split: str
    known: Collection[Instance] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The valid records of a file as lines of JSON, and for each invalid one a sentence with its
    line number.
    """

    lines: tuple[str, ...]
    faults: tuple[str, ...]


def import_experts(path: Path, place: Place, *, opening: int) -> Imported:
    """Return the demonstrations in a file; an instance may have several.

    Args:
        opening: the number of turns before that of the problem, without system turns.

    Raises `DataFileError` when the file cannot be read.
    """
    earlier: dict[str, list[Demonstration]] = {}

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        made = demonstration(record, where, world=place.world, split=place.split, opening=opening)
        _check_known(made.instance, place, where)
        others = earlier.setdefault(made.instance.key, [])
        check_other(made, others)
        others.append(made)
        return {"id": made.instance.key, "reward": made.reward, "messages": _turns(conversation(record, where))}

    return _imported(path, read)


def import_pairs(path: Path, place: Place) -> Imported:
    """Return the preference pairs in a file. Raises `DataFileError` when the file cannot be
    read.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        made = pairs_file.preference_of(record, where, path.name, line, world=place.world, split=place.split)
        instance, shared = made.chosen.instance, len(record["prompt"])
        _check_known(instance, place, where)
        _check_use(pairs_file.fault_of(made), where)
        return {
            "id": None if instance is None else instance.key,
            "prompt": _turns(made.chosen.messages[:shared]),
            "chosen": _turns(made.chosen.messages[shared:]),
            "rejected": _turns(made.rejected.messages[shared:]),
            "chosen_reward": made.chosen_reward,
            "rejected_reward": made.rejected_reward,
        }

    return _imported(path, read)


def import_chat(path: Path) -> Imported:
    """Return the general conversations in a file. Raises `DataFileError` when the file cannot be
    read.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        messages = conversation(record, where)
        _check_use(chat_file.fault_of(messages), where)
        spared = [message.role == "assistant" and not message.train for message in messages]
        turns = [
            {**turn, **({"train": False} if flag else {})} for turn, flag in zip(_turns(messages), spared, strict=True)
        ]
        return {"messages": turns}

    return _imported(path, read)


def _imported(path: Path, read: Callable[[dict[str, Any], str, int], dict[str, Any]]) -> Imported:
    lines: list[str] = []
    faults: list[str] = []
    for file in _files(path):
        for number, found in entries(file, setting="SOURCE"):
            try:
                if isinstance(found, DataFileError):
                    raise found
                lines.append(json.dumps(read(found, f"{file}:{number}", number), ensure_ascii=False))
            except DataFileError as error:
                faults.append(str(error))
    return Imported(lines=tuple(lines), faults=tuple(faults))


def _files(path: Path) -> list[Path]:
    """Return the file, or the files of the folder that hold records, sorted by name."""
    return sorted(file for file in path.rglob("*.json*") if file.is_file()) if path.is_dir() else [path]


def _check_known(instance: Instance | None, place: Place, where: str) -> None:
    if instance is None or place.known is None or instance in place.known:
        return
    if instance.split != place.split:
        raise DataFileError(
            f"{where}: {instance.key} is of split {instance.split}, and records of split {place.split} are read; name "
            "the other with --split"
        )
    raise DataFileError(f"{where}: there is no instance {instance.key}; `agentr env play` shows one by its index")


def _check_use(fault: str, where: str) -> None:
    if fault:
        raise DataFileError(f"{where} is of no use: {fault.replace('-', ' ')}; correct it, or leave it out")


def _turns(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.text} for message in messages]
