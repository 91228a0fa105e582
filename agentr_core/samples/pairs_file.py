"""Ready preference pairs in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.flags import flagged
from agentr_core.samples.json_lines import World, instance_of, number_of, records
from agentr_core.samples.pair_dataset import prompt_of
from agentr_core.samples.record_fields import check_texts
from agentr_core.samples.record_turns import defined_tools, in_context, turns
from agentr_core.types import (
    Message,
    Preference,
    PreferenceCase,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    grown_turn,
)

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
    chosen, rejected = (_side(record, name, where, tools=tools) for name in ("chosen", "rejected"))
    return prompt, chosen, rejected


def _spared(message: Message) -> Message:
    if message.spans:
        return grown_turn([replace(span, train=False) for span in message.spans])
    return replace(message, train=False)


def _side(record: dict[str, Any], key: str, where: str, *, tools: bool) -> tuple[Message, ...]:
    given = [record[key]] if isinstance(record[key], dict) else record[key]
    values = flagged(record, given, f"{where}, {key}") if isinstance(given, list) else given
    side = turns(values, f"{where}, {key}", tools=tools)
    if not side or side[0].role != "assistant":
        raise DataFileError(f"{where}: {key} must begin with a turn of the assistant")
    return side


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
