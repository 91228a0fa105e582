"""Files of demonstrations and of preference pairs, read and checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.chat_file import (
    World,
    check_texts,
    conversation,
    defined_tools,
    flagged,
    holds,
    in_context,
    instance_of,
    number_of,
    records,
    turns,
)
from agentr_core.samples.dataset import prompt_of
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
    found: dict[str, tuple[Demonstration, ...]] = {}
    for number, record in records(path, setting=setting):
        made = demonstration(record, f"{path}:{number}", world=world, split=split, opening=opening)
        earlier = found.get(made.instance.key, ())
        check_other(made, earlier)
        found[made.instance.key] = (*earlier, made)
    return found


def demonstration(record: dict[str, Any], where: str, *, world: World, split: str, opening: int) -> Demonstration:
    """Return the demonstration in a record.

    Turns of the system are skipped, and so are definitions of tools, the `opening` turns before the
    problem's and everything after the last reply. Recorded observations are not read: the
    environment gives them again.

    Raises `DataFileError` for a record of a different form, without a reply, with replies that are
    not to be trained, or with only the beginning of an episode.
    """
    instance = instance_of(record, where, world=world, split=split)
    if holds(record.get("continued_trajectory_ref")):
        raise DataFileError(
            f"{where} goes on in another file (continued_trajectory_ref), and an expert's episode must be whole; leave "
            "it out"
        )
    told = conversation(record, where)
    spoken = [message for message in told if message.role not in ("system", "tools")][opening:]
    # Of a turn that was grown, every second span is a result.
    said = [part for message in spoken if message.role == "assistant" for part in message.parts[::2]]
    replies = tuple(part.text for part in said)
    if not replies or spoken[0].role != "user":
        raise DataFileError(
            f"{where}: after the first {opening} turns there must be the turn of the problem and then replies; "
            "set eto.expert.opening, or --opening, to the number of turns before the problem's"
        )
    if not all(part.train for part in said):
        raise DataFileError(
            f"{where}: some replies are not to be trained, but all of an expert's are; leave the record out, "
            "or give it without them"
        )
    reward = number_of(record, "reward", where)
    return Demonstration(instance=instance, replies=replies, reward=1.0 if reward is None else reward, where=where)


def check_other(made: Demonstration, earlier: Iterable[Demonstration]) -> None:
    """Raise `DataFileError` when a demonstration says the same as an earlier one of its
    instance.
    """
    for one in earlier:
        if one.replies == made.replies:
            raise DataFileError(
                f"{made.where} is the same demonstration of {made.instance.key} as {one.where}; leave one out"
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
    check_texts(record, where)
    key = next((name for name in ("prompt", "conversations", "messages") if name in record), "prompt")
    missing = [name for name in (key, "chosen", "rejected") if name not in record]
    if missing:
        raise DataFileError(f"{where} lacks {' and '.join(missing)}; a pair has prompt, chosen and rejected")
    tools = defined_tools(record) is not None
    said = tuple(map(_spared, turns(record[key], f"{where}, prompt", tools=tools)))
    prompt = in_context(record, said, where)
    if not said or said[-1].role == "assistant":
        raise DataFileError(f"{where}: the prompt must end with a turn of the user")
    sides: list[tuple[Message, ...]] = []
    for key in ("chosen", "rejected"):
        values = [record[key]] if isinstance(record[key], dict) else record[key]
        if isinstance(values, list):
            values = flagged(record, values, f"{where}, {key}")
        side = turns(values, f"{where}, {key}", tools=tools)
        if not side or side[0].role != "assistant":
            raise DataFileError(f"{where}: {key} must begin with a turn of the assistant")
        sides.append(side)
    return prompt, sides[0], sides[1]


def _spared(message: Message) -> Message:
    if message.spans:
        return grown_turn([replace(span, train=False) for span in message.spans])
    return replace(message, train=False)


def fault_of(preference: Preference) -> str:
    """Return in a word why a pair is unusable; the empty string for one that can be trained on."""
    sides = (preference.chosen, preference.rejected)
    if any(side.messages[-1].role != "assistant" for side in sides):
        return "no-agent-turn-at-the-end"
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
