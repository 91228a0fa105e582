"""The import of files of other programs, or folders of them, record by record into the one form
that recipes take.

The files are JSON lines or one array: conversations of AgentTraj, ETO or ShareGPT, turns of OpenAI,
prompts and completions of TRL, or trajectories in ATIF; for pairs, the formats that TRL,
LLaMA-Factory and `agentr export` have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples import chat_file
from agentr_core.samples.chat_file import (
    Use,
    World,
    check_texts,
    conversation,
    defined_tools,
    flagged,
    holds,
    in_context,
    instance_of,
    left_out,
    number_of,
    turns,
)
from agentr_core.samples.dataset import prompt_of
from agentr_core.samples.json_records import entries, records
from agentr_core.samples.published import as_conversation, as_pair
from agentr_core.texts import placed, unreadable
from agentr_core.types import (
    Instance,
    Message,
    Preference,
    PreferenceCase,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    grown_turn,
)

# Files of demonstrations and of preference pairs, read and checked.

# Demonstrations in a file: an expert's replies, to be played again in the environment.


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The replies of an expert in one episode. `reward` is what the file claims: 1 unless it says
    otherwise.
    """

    instance: Instance
    replies: tuple[str, ...]
    reward: float
    where: str
    """File and line."""


def read_demonstrations(
    path: Path, *, world: World, split: str, opening: int, setting: str = "eto.expert.file"
) -> dict[str, tuple[Demonstration, ...]]:
    """Return the demonstrations of a file by the key of their instance, those of one instance in
    file order.

    A record is a conversation as `chat_file.read_chat` takes it, with the `id` of its instance and,
    if it is not 1, the `reward` that was reached. `setting` names the file for error messages.

    Raises:
        DataFileError: the file cannot be read, or a record has a different form, no reply, or the
            same replies as an earlier one of its instance.
    """
    by_instance: dict[str, tuple[Demonstration, ...]] = {}
    for number, record in records(path, setting=setting):
        demo = demonstration(record, f"{path}:{number}", world=world, split=split, opening=opening)
        previous = by_instance.get(demo.instance.key, ())
        check_other(demo, previous)
        by_instance[demo.instance.key] = (*previous, demo)
    return by_instance


def demonstration(record: dict[str, Any], where: str, *, world: World, split: str, opening: int) -> Demonstration:
    """Return the demonstration in a record.

    Turns of the system are skipped, and so are definitions of tools, the `opening` turns before the
    problem's and everything after the last reply. Recorded observations are not read: the
    environment gives them again.

    Raises `DataFileError` for a record of a different form, without a reply, with replies that are
    not to be trained, or with only the beginning of an episode.
    """
    record = as_conversation(record, where)
    instance = instance_of(record, where, world=world, split=split)
    if holds(record.get("continued_trajectory_ref")):
        raise DataFileError(
            f"{where} goes on in another file (continued_trajectory_ref), and an expert's episode must be whole; leave "
            "it out"
        )
    messages = conversation(record, where)
    turn_list = [message for message in messages if message.role not in ("system", "tools")][opening:]
    # Of a turn that was grown, every second span is a result.
    parts = [part for message in turn_list if message.role == "assistant" for part in message.parts[::2]]
    replies = tuple(part.text for part in parts)
    if not replies or turn_list[0].role != "user":
        raise DataFileError(
            f"{where}: after the first {opening} turns there must be the turn of the problem and then replies; "
            "set eto.expert.opening, or --opening, to the number of turns before the problem's"
        )
    if not all(part.train for part in parts):
        raise DataFileError(
            f"{where}: some replies are not to be trained, but all of an expert's are; leave the record out, "
            "or give it without them"
        )
    reward = number_of(record, "reward", where)
    return Demonstration(instance=instance, replies=replies, reward=1.0 if reward is None else reward, where=where)


def check_other(new: Demonstration, previous: Iterable[Demonstration]) -> None:
    """Raise `DataFileError` when a demonstration says the same as an earlier one of its
    instance.
    """
    for other in previous:
        if other.replies == new.replies:
            raise DataFileError(
                f"{new.where} is the same demonstration of {new.instance.key} as {other.where}; leave one out"
            )


# Ready preference pairs in a file.

STAGE = "preferences"


def read_pairs(path: Path, *, world: World, split: str) -> tuple[tuple[Preference, ...], tuple[Rejection, ...]]:
    """Return the preferences of a file, and the rejections of unusable pairs.

    A record has lists of turns under `prompt` (its last turn the user's), `chosen` and `rejected`
    (first and last turn the assistant's), the `id` of its instance, and maybe `chosen_reward` and
    `rejected_reward`. As in files for LLaMA-Factory, the prompt may stand under `conversations`,
    and a side be one turn. A turn of a side whose flag `train`, `loss` or `weight` says no is not
    trained. A pair is unusable when both sides are the same, a side does not end with a reply that
    is trained, the sides differ before their first one, or only one of the rewards is given.

    Raises:
        DataFileError: the file cannot be read, or a line has a different form; the message names
            file and line.
    """
    preferences, rejections = [], []
    for number, record in records(path, setting="eto.preferences.file"):
        where = f"{path}:{number}"
        preference = preference_of(record, where, path.name, number, world=world, split=split)
        fault = fault_of(preference)
        if fault:
            rejections.append(Rejection(stage=STAGE, subject=f"{path.name}:{number}", reason=fault))
        else:
            preferences.append(preference)
    return tuple(preferences), tuple(rejections)


def preference_of(
    record: dict[str, Any], where: str, name: str, number: int, *, world: World, split: str
) -> Preference:
    """Return the preference in a record, which is line `number` of a file. Raises `DataFileError`
    for a record of a different form.
    """
    record = as_pair(record, where)
    prompt, *sides = parts_of(record, where)
    instance = instance_of(record, where, world=world, split=split)
    origin = Provenance(extra={"file": name, "line": number})
    chosen, rejected = (
        Sample(kind=kind, messages=prompt + side, instance=instance, provenance=origin)
        for side, kind in zip(sides, (SampleKind.CHOSEN, SampleKind.REJECTED), strict=True)
    )
    return Preference(
        case=PreferenceCase.FILE,
        chosen=chosen,
        rejected=rejected,
        chosen_reward=number_of(record, "chosen_reward", where),
        rejected_reward=number_of(record, "rejected_reward", where),
    )


def parts_of(
    record: dict[str, Any], where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Return the prompt of the pair in a record, which carries no loss, and its two sides. Raises
    `DataFileError` for a record of a different form.
    """
    record = as_pair(record, where)
    check_texts(record, where)
    key = next((name for name in ("prompt", "conversations", "messages") if name in record), "prompt")
    missing = [name for name in (key, "chosen", "rejected") if name not in record]
    if missing:
        raise DataFileError(f"{where} lacks {' and '.join(missing)}; a pair has prompt, chosen and rejected")
    tools = defined_tools(record) is not None
    turns_before = tuple(map(_without_loss, turns(record[key], f"{where}, prompt", tools=tools)))
    prompt = in_context(record, turns_before, where)
    if not turns_before or turns_before[-1].role == "assistant":
        raise DataFileError(f"{where}: the prompt must end with a turn of the user")
    chosen, rejected = (_side(record, name, where, tools=tools) for name in ("chosen", "rejected"))
    return prompt, chosen, rejected


def _without_loss(message: Message) -> Message:
    if message.spans:
        return grown_turn([replace(span, train=False) for span in message.spans])
    return replace(message, train=False)


def _side(record: dict[str, Any], key: str, where: str, *, tools: bool) -> tuple[Message, ...]:
    value = [record[key]] if isinstance(record[key], dict) else record[key]
    values = flagged(record, value, f"{where}, {key}") if isinstance(value, list) else value
    side = turns(values, f"{where}, {key}", tools=tools)
    if not side or side[0].role != "assistant":
        raise DataFileError(f"{where}: {key} must begin with a turn of the assistant")
    return side


def fault_of(preference: Preference) -> str:
    """Return in a word why a pair is unusable; the empty string for one that can be trained on."""
    sides = (preference.chosen, preference.rejected)
    if any(side.messages[-1].role != "assistant" for side in sides):
        return "no-agent-turn-at-the-end"
    if any(chat_file.lacks_tools(side.messages) for side in sides):
        return "calls-tools-that-it-does-not-define"
    if not all(side.messages[-1].train for side in sides):
        return "last-reply-not-trained"
    if preference.chosen.messages == preference.rejected.messages:
        return "same-sides"
    if prompt_of(preference.chosen) != prompt_of(preference.rejected):
        return "different-prompts"
    if (preference.chosen_reward is None) != (preference.rejected_reward is None):
        return "missing-reward"
    if preference.margin is not None and preference.margin <= 0:
        return "chosen-is-not-better"
    return ""


EXPERT, PAIRS, GENERAL = "eto.expert.file", "eto.preferences.file", "data.general.file"
"""The fields of a recipe that take these files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The world and split that the instances of a file belong to. `known` are the existing
    instances, None if these are not known.
    """

    world: World
    split: str
    known: Collection[Instance] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The valid records of a file as lines of JSON, and for each invalid one a sentence with its
    line number. `left_out` has the fields of valid records that were not read, and in how many.
    """

    lines: tuple[str, ...]
    faults: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


def import_experts(path: Path, target: Target, *, opening: int) -> ImportResult:
    """Return the demonstrations in a file; an instance may have several.

    Args:
        opening: the number of turns before that of the problem, without system turns.

    Raises `DataFileError` when the file cannot be read.
    """
    by_instance: dict[str, list[Demonstration]] = {}

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        demo = demonstration(record, where, world=target.world, split=target.split, opening=opening)
        _check_known(demo.instance, target, where)
        previous = by_instance.setdefault(demo.instance.key, [])
        check_other(demo, previous)
        previous.append(demo)
        return {
            "id": demo.instance.key,
            "reward": demo.reward,
            **_record_of(conversation(record, where), "messages"),
        }

    return _imported(path, read, "expert")


def import_pairs(path: Path, target: Target) -> ImportResult:
    """Return the preference pairs in a file. Raises `DataFileError` when the file cannot be
    read.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        preference = preference_of(record, where, path.name, line, world=target.world, split=target.split)
        instance = preference.chosen.instance
        prompt, chosen, rejected = parts_of(record, where)
        _check_known(instance, target, where)
        _check_use(fault_of(preference), where)
        return {
            "id": None if instance is None else instance.key,
            **_record_of(prompt, "prompt", flags=False),
            **_record_of(chosen, "chosen"),
            **_record_of(rejected, "rejected"),
            "chosen_reward": preference.chosen_reward,
            "rejected_reward": preference.rejected_reward,
        }

    return _imported(path, read, "pairs")


def import_chat(path: Path, tools: list[Any] | None = None) -> ImportResult:
    """Return the general conversations in a file. Raises `DataFileError` when the file cannot be
    read.

    Args:
        tools: the definitions for those that call tools and define none.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        messages = conversation(record, where)
        if tools is not None and chat_file.lacks_tools(messages):
            messages = (Message(role="tools", text=json.dumps(tools, ensure_ascii=False)), *messages)
        _check_use(chat_file.fault_of(messages), where)
        return _record_of(messages, "messages")

    return _imported(path, read, "general")


def read_tools(path: Path) -> list[Any]:
    """Return the definitions of tools in a file, a JSON list of functions as OpenAI defines them.
    Raises `DataFileError` for any other.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"file {placed(path)} cannot be read: {unreadable(error)}; name a JSON list") from error
    message, *_ = conversation({"tools": text, "messages": []}, str(path)) or (None,)
    if message is None:
        raise DataFileError(f"{path} defines no tool; give a JSON list of functions as OpenAI defines them")
    return list(json.loads(message.text))


def _imported(path: Path, read: Callable[[dict[str, Any], str, int], dict[str, Any]], use: Use) -> ImportResult:
    lines: list[str] = []
    faults: list[str] = []
    unread_fields: Counter[str] = Counter()
    for file in _files(path):
        for number, record in entries(file, setting="SOURCE"):
            try:
                if isinstance(record, DataFileError):
                    raise record
                lines.append(json.dumps(read(record, f"{file}:{number}", number), ensure_ascii=False))
                unread_fields.update(left_out(record, use))
            except DataFileError as error:
                faults.append(str(error))
    return ImportResult(lines=tuple(lines), faults=tuple(faults), left_out=unread_fields)


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


def _check_known(instance: Instance | None, target: Target, where: str) -> None:
    if instance is None or target.known is None or instance in target.known:
        return
    if instance.split != target.split:
        raise DataFileError(
            f"{where}: {instance.key} is of split {instance.split}, and records of split {target.split} are read; name "
            "the other with --split"
        )
    raise DataFileError(f"{where}: there is no instance {instance.key}; `agentr env play` shows one by its index")


def _check_use(fault: str, where: str) -> None:
    if fault:
        raise DataFileError(f"{where} is of no use: {fault.replace('-', ' ')}; correct it, or leave it out")


def _record_of(messages: tuple[Message, ...], key: str, *, flags: bool = True) -> dict[str, Any]:
    """Return turns under a key, and the definitions of tools, if they begin with some, beside them.
    With `flags`, replies that are not trained say so.
    """
    tools = [message for message in messages[:1] if message.role == "tools"]
    turns = [_turn(message, flags=flags) for message in messages[len(tools) :]]
    return {key: turns, **({"tools": json.loads(tools[0].text)} if tools else {})}


def _turn(message: Message, *, flags: bool) -> dict[str, Any]:
    spans = [{"text": span.text, "train": span.train} for span in message.spans]
    untrained = flags and message.role == "assistant" and not message.train
    return {
        "role": message.role,
        "content": message.text,
        **({"spans": spans} if spans else {"train": False} if untrained else {}),
    }
