"""The import of files of other programs, or folders of them, record by record into the one form
that recipes take.

The files are JSON lines or one array: conversations of AgentTraj, ETO or ShareGPT, turns of OpenAI,
prompts and completions of TRL, or trajectories in ATIF; for pairs, the formats that TRL,
LLaMA-Factory and `agentr export` have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples import chat_file, demonstration_files
from agentr_core.samples.chat_file import Use, World, conversation, entries, left_out
from agentr_core.samples.demonstration_files import Demonstration, check_other, demonstration
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
    line number. `left_out` has the fields of valid records that were not read, and in how many.
    """

    lines: tuple[str, ...]
    faults: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


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
        return {"id": made.instance.key, "reward": made.reward, **_written(conversation(record, where), "messages")}

    return _imported(path, read, "expert")


def import_pairs(path: Path, place: Place) -> Imported:
    """Return the preference pairs in a file. Raises `DataFileError` when the file cannot be
    read.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        made = demonstration_files.preference_of(record, where, path.name, line, world=place.world, split=place.split)
        instance = made.chosen.instance
        prompt, chosen, rejected = demonstration_files.parts_of(record, where)
        _check_known(instance, place, where)
        _check_use(demonstration_files.fault_of(made), where)
        return {
            "id": None if instance is None else instance.key,
            **_written(prompt, "prompt", flags=False),
            **_written(chosen, "chosen"),
            **_written(rejected, "rejected"),
            "chosen_reward": made.chosen_reward,
            "rejected_reward": made.rejected_reward,
        }

    return _imported(path, read, "pairs")


def import_chat(path: Path) -> Imported:
    """Return the general conversations in a file. Raises `DataFileError` when the file cannot be
    read.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        messages = conversation(record, where)
        _check_use(chat_file.fault_of(messages), where)
        return _written(messages, "messages")

    return _imported(path, read, "general")


def _imported(path: Path, read: Callable[[dict[str, Any], str, int], dict[str, Any]], use: Use) -> Imported:
    lines: list[str] = []
    faults: list[str] = []
    unread: Counter[str] = Counter()
    for file in _files(path):
        for number, found in entries(file, setting="SOURCE"):
            try:
                if isinstance(found, DataFileError):
                    raise found
                lines.append(json.dumps(read(found, f"{file}:{number}", number), ensure_ascii=False))
                unread.update(left_out(found, use))
            except DataFileError as error:
                faults.append(str(error))
    return Imported(lines=tuple(lines), faults=tuple(faults), left_out=unread)


def _files(path: Path) -> list[Path]:
    """Return the file, or the files of the folder that hold records, sorted by name. Raises
    `DataFileError` for a folder that holds the same samples twice.
    """
    if not path.is_dir():
        return [path]
    # LLaMA-Factory's description of the files beside it has no records.
    files = sorted(file for file in path.rglob("*.json*") if file.is_file() and file.name != "dataset_info.json")
    for file in files:
        if file.name == "prompt_completion.jsonl" and file.with_name("messages.jsonl") in files:
            raise DataFileError(
                f"{file.parent} holds the same samples as messages and as prompt_completion; name a file"
            )
    return files


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


def _written(messages: tuple[Message, ...], key: str, *, flags: bool = True) -> dict[str, Any]:
    """Return turns under a key, and the definitions of tools, if they begin with some, beside them.
    With `flags`, replies that are not trained say so.
    """
    tools = [message for message in messages[:1] if message.role == "tools"]
    turns = [_turn(message, flags=flags) for message in messages[len(tools) :]]
    return {key: turns, **({"tools": json.loads(tools[0].text)} if tools else {})}


def _turn(message: Message, *, flags: bool) -> dict[str, Any]:
    spans = [{"text": span.text, "train": span.train} for span in message.spans]
    spared = flags and message.role == "assistant" and not message.train
    return {
        "role": message.role,
        "content": message.text,
        **({"spans": spans} if spans else {"train": False} if spared else {}),
    }
