"""Import of files of other programs, or folders of them: each record is read, checked and converted
to the one form that recipes take.

The files are JSONL or one JSON array. Conversations may be in the format of AgentTraj, ETO,
ShareGPT or OpenAI, TRL's prompts and completions, or ATIF trajectories; pairs in the format of TRL,
LLaMA-Factory or `agentr export`.
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
    RecordUse,
    World,
    check_text_only,
    conversation,
    defined_tools,
    has_value,
    ignored_fields,
    instance_of,
    number_of,
    parse_turns,
    with_flags,
    with_system_and_tools,
)
from agentr_core.samples.dataset import prompt_of
from agentr_core.samples.published import as_conversation, as_pair
from agentr_core.samples.record_files import records, records_or_errors
from agentr_core.texts import path_for_message, unreadable_reason
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

# Demonstrations in a file: an expert's replies, to be played again in the environment.


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The replies of an expert in one episode. `reward` is the one given in the file, 1 if there is
    none.
    """

    instance: Instance
    replies: tuple[str, ...]
    reward: float
    where: str
    """File and line."""


def read_demonstrations(
    path: Path, *, world: World, split: str, opening: int, setting: str = "eto.expert.file"
) -> dict[str, tuple[Demonstration, ...]]:
    """Return the demonstrations of a file by the key of their instance; those of one instance are
    in file order.

    A record is a conversation as in `chat_file.read_chat`, with the `id` of its instance and the
    `reward` that was reached, if that is not 1. `setting` is the field of a recipe that names the
    file, for error messages. For the other arguments see `demonstration`.

    Raises:
        DataFileError: the file cannot be read, `demonstration` raises it, or a record has the same
            replies as an earlier one of its instance.
    """
    by_instance: dict[str, tuple[Demonstration, ...]] = {}
    for number, record in records(path, setting=setting):
        demo = demonstration(record, f"{path}:{number}", world=world, split=split, opening=opening)
        previous = by_instance.get(demo.instance.key, ())
        check_not_repeated(demo, previous)
        by_instance[demo.instance.key] = (*previous, demo)
    return by_instance


def demonstration(record: dict[str, Any], where: str, *, world: World, split: str, opening: int) -> Demonstration:
    """Return the demonstration in a record. Only the replies are read: the environment gives the
    observations again when they are replayed.

    Args:
        world, split: the environment, and the split of an id that is a mere index.
        opening: the number of turns before the one that states the problem, not counting system
            and `tools` turns; they are skipped.

    Raises `DataFileError` for a malformed record, one without a reply or with a reply that is not
    trained, or one that continues in another file.
    """
    record = as_conversation(record, where)
    instance = instance_of(record, where, world=world, split=split)
    if has_value(record.get("continued_trajectory_ref")):
        raise DataFileError(
            f"{where} goes on in another file (continued_trajectory_ref), and an expert's episode must be whole; leave "
            "it out"
        )
    messages = conversation(record, where)
    episode_turns = [message for message in messages if message.role not in ("system", "tools")][opening:]
    # In a turn that was grown by continuation, every second span is an observation.
    reply_spans = [span for message in episode_turns if message.role == "assistant" for span in message.parts[::2]]
    replies = tuple(span.text for span in reply_spans)
    if not replies or episode_turns[0].role != "user":
        raise DataFileError(
            f"{where}: after the first {opening} turns there must be the turn of the problem and then replies; "
            "set eto.expert.opening, or --opening, to the number of turns before the problem's"
        )
    if not all(span.train for span in reply_spans):
        raise DataFileError(
            f"{where}: some replies are not to be trained, but all of an expert's are; leave the record out, "
            "or give it without them"
        )
    reward = number_of(record, "reward", where)
    return Demonstration(instance=instance, replies=replies, reward=1.0 if reward is None else reward, where=where)


def check_not_repeated(demo: Demonstration, previous: Iterable[Demonstration]) -> None:
    """Raise `DataFileError` if a demonstration has the same replies as one of the `previous` ones,
    which are of the same instance.
    """
    for earlier_demo in previous:
        if earlier_demo.replies == demo.replies:
            raise DataFileError(
                f"{demo.where} is the same demonstration of {demo.instance.key} as {earlier_demo.where}; leave one out"
            )


# Ready preference pairs in a file.

STAGE = "preferences"


def read_pairs(path: Path, *, world: World, split: str) -> tuple[tuple[Preference, ...], tuple[Rejection, ...]]:
    """Return the preferences of a file, and the rejections of unusable pairs.

    A record has lists of turns under `prompt` (the last one a user turn), `chosen` and `rejected`
    (the first and the last one a reply), the `id` of its instance, and optionally `chosen_reward`
    and `rejected_reward`. As in files for LLaMA-Factory, the prompt may be under `conversations`,
    and a side may be one turn. Replies of a side are trained unless a flag
    (`chat_file.FLAG_FIELDS`) says no. Pairs are unusable for the reasons of `fault_of`; the subject
    of a rejection is the file's name and the line.

    Raises:
        DataFileError: the file cannot be read, or a record is malformed; the message names file and
            line.
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
    """Return the preference in a record. File name and line `number` are stored as its provenance;
    `where` is for error messages. Raises `DataFileError` for a malformed record.
    """
    record = as_pair(record, where)
    prompt, *sides = prompt_and_sides(record, where)
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


def prompt_and_sides(
    record: dict[str, Any], where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Return the prompt (without loss), the chosen side and the rejected side of the pair in a
    record. Raises `DataFileError` for a malformed record.
    """
    record = as_pair(record, where)
    check_text_only(record, where)
    key = next((name for name in ("prompt", "conversations", "messages") if name in record), "prompt")
    missing = [name for name in (key, "chosen", "rejected") if name not in record]
    if missing:
        raise DataFileError(f"{where} lacks {' and '.join(missing)}; a pair has prompt, chosen and rejected")
    tools = defined_tools(record) is not None
    turns_before = tuple(map(_without_loss, parse_turns(record[key], f"{where}, prompt", tools=tools)))
    prompt = with_system_and_tools(record, turns_before, where)
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
    values = with_flags(record, value, f"{where}, {key}") if isinstance(value, list) else value
    side = parse_turns(values, f"{where}, {key}", tools=tools)
    if not side or side[0].role != "assistant":
        raise DataFileError(f"{where}: {key} must begin with a turn of the assistant")
    return side


def fault_of(preference: Preference) -> str:
    """Return why a pair cannot be trained on, as a slug; the empty string if it can.

    The reasons: a side does not end with a trained reply, or has results of tools that it does not
    define; the sides are equal, or differ before their first trained reply; only one of the rewards
    is given, or the chosen one is not higher.
    """
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
"""The fields of a recipe that name files of demonstrations, of pairs and of general chat data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The environment and split to which the instances of a file belong. `known_instances` are
    those that exist, None if that is not known; records of others are invalid.
    """

    world: World
    split: str
    known_instances: Collection[Instance] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The result of an import: the valid records as lines of JSON, and an error message with file
    and line for each invalid one. `num_ignored_by_field` maps each field that was ignored to the
    number of valid records that have it.
    """

    lines: tuple[str, ...]
    faults: tuple[str, ...]
    num_ignored_by_field: Mapping[str, int] = field(default_factory=dict)


def import_experts(path: Path, target: Target, *, opening: int) -> ImportResult:
    """Import the demonstrations in a file or folder; an instance may have several.

    Args:
        opening: see `demonstration`.

    Raises `DataFileError` when a file cannot be read.
    """
    by_instance: dict[str, list[Demonstration]] = {}

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        demo = demonstration(record, where, world=target.world, split=target.split, opening=opening)
        _check_known(demo.instance, target, where)
        previous = by_instance.setdefault(demo.instance.key, [])
        check_not_repeated(demo, previous)
        previous.append(demo)
        return {
            "id": demo.instance.key,
            "reward": demo.reward,
            **_record_of(conversation(record, where), "messages"),
        }

    return _import_records(path, read, "expert")


def import_pairs(path: Path, target: Target) -> ImportResult:
    """Import the preference pairs in a file or folder. Raises `DataFileError` when a file cannot be
    read.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        preference = preference_of(record, where, path.name, line, world=target.world, split=target.split)
        instance = preference.chosen.instance
        prompt, chosen, rejected = prompt_and_sides(record, where)
        _check_known(instance, target, where)
        _check_usable(fault_of(preference), where)
        return {
            "id": None if instance is None else instance.key,
            **_record_of(prompt, "prompt", flags=False),
            **_record_of(chosen, "chosen"),
            **_record_of(rejected, "rejected"),
            "chosen_reward": preference.chosen_reward,
            "rejected_reward": preference.rejected_reward,
        }

    return _import_records(path, read, "pairs")


def import_chat(path: Path, tools: list[Any] | None = None) -> ImportResult:
    """Import the general conversations in a file or folder. Raises `DataFileError` when a file
    cannot be read.

    Args:
        tools: the tool definitions for conversations that have results of tools but define none.
    """

    def read(record: dict[str, Any], where: str, line: int) -> dict[str, Any]:
        messages = conversation(record, where)
        if tools is not None and chat_file.lacks_tools(messages):
            messages = (Message(role="tools", text=json.dumps(tools, ensure_ascii=False)), *messages)
        _check_usable(chat_file.fault_of(messages), where)
        return _record_of(messages, "messages")

    return _import_records(path, read, "general")


def read_tools(path: Path) -> list[Any]:
    """Return the tool definitions in a file, a JSON list of functions as in OpenAI's protocol.
    Raises `DataFileError` if the file cannot be read, or contains no such list or an empty one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(
            f"file {path_for_message(path)} cannot be read: {unreadable_reason(error)}; name a JSON list"
        ) from error
    message, *_ = conversation({"tools": text, "messages": []}, str(path)) or (None,)
    if message is None:
        raise DataFileError(f"{path} defines no tool; give a JSON list of functions as OpenAI defines them")
    return list(json.loads(message.text))


def _import_records(
    path: Path, read: Callable[[dict[str, Any], str, int], dict[str, Any]], use: RecordUse
) -> ImportResult:
    lines: list[str] = []
    faults: list[str] = []
    num_ignored_by_field: Counter[str] = Counter()
    for file in _files(path):
        for number, record in records_or_errors(file, setting="SOURCE"):
            try:
                if isinstance(record, DataFileError):
                    raise record
                lines.append(json.dumps(read(record, f"{file}:{number}", number), ensure_ascii=False))
                num_ignored_by_field.update(ignored_fields(record, use))
            except DataFileError as error:
                faults.append(str(error))
    return ImportResult(lines=tuple(lines), faults=tuple(faults), num_ignored_by_field=num_ignored_by_field)


def _files(path: Path) -> list[Path]:
    """Return the file, or the files with records in a folder and its subfolders, sorted by path.
    Raises `DataFileError` for a folder with an export for TRL that has the same samples twice.
    """
    if not path.is_dir():
        return [path]
    # `dataset_info.json`, which describes files for LLaMA-Factory, has no records.
    files = sorted(
        file
        for pattern in ("*.json*", "*.parquet")
        for file in path.rglob(pattern)
        if file.is_file() and file.name != "dataset_info.json"
    )
    for file in files:
        if file.name == "prompt_completion.jsonl" and file.with_name("messages.jsonl") in files:
            raise DataFileError(
                f"{file.parent} holds the same samples as messages and as prompt_completion; name a file"
            )
    return files


def _check_known(instance: Instance | None, target: Target, where: str) -> None:
    if instance is None or target.known_instances is None or instance in target.known_instances:
        return
    if instance.split != target.split:
        raise DataFileError(
            f"{where}: {instance.key} is of split {instance.split}, and records of split {target.split} are read; name "
            "the other with --split"
        )
    raise DataFileError(f"{where}: there is no instance {instance.key}; `agentr env play` shows one by its index")


def _check_usable(fault: str, where: str) -> None:
    if fault:
        raise DataFileError(f"{where} is of no use: {fault.replace('-', ' ')}; correct it, or leave it out")


def _record_of(messages: tuple[Message, ...], key: str, *, flags: bool = True) -> dict[str, Any]:
    """Return a record with the turns under `key` and, if they begin with tool definitions, these
    under `tools`. With `flags`, replies that are not trained have `train` False.
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
