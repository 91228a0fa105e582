"""Ready preference pairs in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.json_lines import World, instance_of, number_of, records, turns
from agentr_core.types import Message, Preference, PreferenceCase, Provenance, Rejection, Sample, SampleKind

STAGE = "preferences"


def read_pairs(path: Path, *, world: World, split: str) -> tuple[tuple[Preference, ...], tuple[Rejection, ...]]:
    """Return the preferences of a file, and the rejections of unusable pairs.

    A record has lists of turns under `prompt` (its last turn the user's), `chosen` and `rejected`
    (first and last turn the assistant's), the `id` of its instance, and maybe `chosen_reward` and
    `rejected_reward`. A pair is unusable when both sides are the same, a side does not end with a
    reply, or only one of the rewards is given.

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
    missing = [key for key in ("prompt", "chosen", "rejected") if key not in record]
    if missing:
        raise DataFileError(f"{where} lacks {' and '.join(missing)}; a pair has prompt, chosen and rejected")
    prompt = tuple(replace(m, train=False) for m in turns(record["prompt"], f"{where}, prompt"))
    if not prompt or prompt[-1].role == "assistant":
        raise DataFileError(f"{where}: the prompt must end with a turn of the user")
    instance = instance_of(record, where, world=world, split=split)
    origin = Provenance(extra={"file": name, "line": number})
    chosen, rejected = (
        Sample(kind=kind, messages=prompt + _side(record, key, where), instance=instance, provenance=origin)
        for key, kind in (("chosen", SampleKind.CHOSEN), ("rejected", SampleKind.REJECTED))
    )
    return Preference(
        case=PreferenceCase.FILE,
        chosen=chosen,
        rejected=rejected,
        chosen_reward=number_of(record, "chosen_reward", where),
        rejected_reward=number_of(record, "rejected_reward", where),
    )


def _side(record: dict[str, Any], key: str, where: str) -> tuple[Message, ...]:
    side = turns(record[key], f"{where}, {key}")
    if not side or side[0].role != "assistant":
        raise DataFileError(f"{where}: {key} must begin with a turn of the assistant")
    return side


def fault_of(preference: Preference) -> str:
    """Return in a word why a pair is unusable; the empty string for one that can be trained on."""
    sides = (preference.chosen, preference.rejected)
    if any(side.messages[-1].role != "assistant" for side in sides):
        return "no-agent-turn-at-the-end"
    if preference.chosen.messages == preference.rejected.messages:
        return "same-sides"
    if (preference.chosen_reward is None) != (preference.rejected_reward is None):
        return "missing-reward"
    if preference.margin is not None and preference.margin <= 0:
        return "chosen-is-not-better"
    return ""
