"""The fields of a record beside its texts and flags: which would change what is trained and cannot
be read, and which are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from agentr_core.errors import DataFileError
from agentr_core.samples.atif_turns import OBSERVED_AS, is_atif
from agentr_core.samples.flags import FLAGS
from agentr_core.samples.json_lines import records

Use = Literal["expert", "pairs", "general"]
"""What records are read for."""
SYSTEM = ("system", "system_prompt")
"""The fields that have the system text beside the turns."""
_NAMED = 100
"""The most fields that are named."""
_LISTS = ("messages", "conversations")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_CALLS = ("tool_calls", "function_call")
_PARTLY = ("train_detail", "training_detail", "loss_scale", "loss_mask", "mask")
"""Fields in which other programs weigh or mask parts of a turn."""
_LABELS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
_VERDICTS = ("label", "kto_tag")
_IDS = ("id", "item_id", "instance_id", "extra.instance_id")
_OF_USE: Mapping[Use, tuple[str, ...]] = {
    "general": (),
    "expert": (*_IDS, "reward"),
    "pairs": (*_IDS, "prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"),
}
_OF_TURNS = ("role", "content", "from", "value", "spans", *FLAGS)
_OF_STEPS = (
    "step_id",
    "source",
    "message",
    "is_copied_context",
    "llm_call_count",
    "extra.train",
    f"extra.{OBSERVED_AS}",
)
_UNFLAGGED = {"id", "kind", "conversations", "system"}
"""The fields of a line that earlier versions exported for LLaMA-Factory, without flags."""


def holds(value: Any) -> bool:
    """Return whether a field holds something: null and what is empty are as if it were missing."""
    return value is not None and value not in ("", [], {})


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Raise `DataFileError` for a conversation with fields that would change what is trained, and
    that cannot be read.
    """
    check_texts(record, where)
    if all(holds(record.get(side)) for side in ("chosen", "rejected")):
        raise DataFileError(
            f"{where} is a preference pair; import it with --as pairs, or leave chosen and rejected out"
        )
    for name in _VERDICTS:
        if record.get(name) is False:
            raise DataFileError(f"{where}: {name} is false, so its answer is a bad one; leave the record out")
    extra = record.get("extra")
    if is_atif(record) and isinstance(extra, dict) and extra.get("side") == "rejected":
        raise DataFileError(f"{where} is the rejected side of a preference pair; leave it out")
    masks = [name for name in _LABELS if isinstance(record.get(name), list)]
    if masks and not any(isinstance(record.get(name), list) for name in FLAGS):
        raise DataFileError(
            f"{where}: {masks[0]} says which tokens are trained, and whole turns are read; give a list train with a "
            "flag for each turn"
        )
    spoken = record.get("conversations")
    if record.keys() == _UNFLAGGED and isinstance(spoken, list) and not any(map(_has_flag, spoken)):
        raise DataFileError(
            f"{where} was exported for LLaMA-Factory by an earlier version of agentr, without flags, and only its last "
            "reply is to be trained; export it again"
        )


def check_texts(record: Mapping[str, Any], where: str) -> None:
    """Raise `DataFileError` for a record with more than texts, such as pictures, or with turns in a
    field that is not read.
    """
    for name in _MEDIA:
        if holds(record.get(name)):
            raise DataFileError(f"{where} has {name}, and only texts are read; leave the record out")
    if holds(record.get("history")):
        raise DataFileError(f"{where} has turns in history, too; write all of them into one list")
    if holds(record.get("functions")):
        raise DataFileError(f"{where} defines functions in an old form; write them as tools")


def check_turn(turn: Mapping[str, Any], where: str) -> None:
    """Raise `DataFileError` for a turn with fields that would change what is trained, and that a
    turn of text cannot hold.
    """
    for name in _CALLS:
        if holds(turn.get(name)):
            raise DataFileError(
                f"{where} has {name}, which a turn of text cannot hold; write the call into its text, as the model is "
                "to write it"
            )
    for name in _MEDIA:
        if holds(turn.get(name)):
            raise DataFileError(f"{where} has {name}, and only texts are read; leave the record out")
    for name in _PARTLY:
        if holds(turn.get(name)):
            raise DataFileError(f"{where} has {name}, and a turn is trained as a whole or not at all; leave it out")


def left_out(record: Mapping[str, Any], use: Use) -> frozenset[str]:
    """Return the names of the fields of a record that hold something and are not read, those
    of turns and steps after the name of their list.
    """
    if is_atif(record):
        return frozenset(_of_atif(record, use))
    turns = next((name for name in _LISTS if holds(record.get(name))), "prompt")
    read = {*_OF_USE[use], *SYSTEM, *FLAGS, "tools", turns, *(("completion",) if turns == "prompt" else ())}
    lists = (turns, "completion", "chosen", "rejected")
    return frozenset(
        [
            *_unread(record, read),
            *(name for key in lists if key in read for name in _of_turns(record.get(key), key)),
        ]
    )


def fields_left_out(path: Path, use: Use, *, setting: str) -> Counter[str]:
    """Return the fields that `left_out` names, and of how many records of a file. Raises as
    `json_lines.records`.
    """
    return Counter(name for _, record in records(path, setting=setting) for name in left_out(record, use))


def named(fields: Mapping[str, int]) -> str:
    """Return in words which fields are left out, and of how many records."""
    each = [f"{name} ({count:,})" for name, count in sorted(fields.items())]
    more = f" and {len(each) - _NAMED:,} more" if each[_NAMED:] else ""
    return f"fields left out, and of how many records: {', '.join(each[:_NAMED])}{more}"


def _of_turns(values: Any, key: str) -> Iterator[str]:
    # A side of a pair may be one turn alone.
    for turn in _objects(values if isinstance(values, list) else [values]):
        yield from (f"{key}.{name}" for name in _unread(turn, _OF_TURNS))
        role = turn.get("role", turn.get("from"))
        if role not in ("assistant", "gpt"):
            # Only replies are trained.
            yield from (f"{key}.{name} of {role}" for name in FLAGS if turn.get(name) in (True, 1))


def _of_atif(record: Mapping[str, Any], use: Use) -> Iterator[str]:
    yield from _unread(record, ("schema_version", "steps", "agent.tool_definitions", *_OF_USE[use], *FLAGS, *SYSTEM))
    for step in _objects(record.get("steps")):
        yield from (f"steps.{name}" for name in _unread(step, (*_OF_STEPS, "observation")))
        for seen in _objects([step.get("observation")]):
            for result in _objects(seen.get("results")):
                yield from (f"steps.observation.{name}" for name in _unread(result, ("content",)))


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _unread(fields: Mapping[str, Any], read: Collection[str]) -> Iterator[str]:
    """Yield the names of fields that are not read; one of which a part is read by the names of its
    other parts.
    """
    for name, value in fields.items():
        if not holds(value) or name in read:
            continue
        parts = {one.partition(".")[2] for one in read if one.startswith(f"{name}.")}
        if parts and isinstance(value, dict):
            yield from (f"{name}.{part}" for part, held in value.items() if holds(held) and part not in parts)
        else:
            yield name


def _has_flag(turn: Any) -> bool:
    return isinstance(turn, dict) and any(name in turn for name in FLAGS)
