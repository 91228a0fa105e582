"""What a record of other programs says about which of its replies are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.errors import DataFileError

FLAGS = ("train", "loss", "weight", "training")
"""The fields that say it: our own and Axolotl's, AgentTraj's, that of OpenAI's fine-tuning, and
Axolotl's of older versions.
"""
_SHOWN = 60


def flag(value: Any, what: str) -> bool | None:
    """Return what a field says about training: yes, no, or nothing.

    No is false, 0 and the text "false"; yes is true and 1; null says nothing. A list says what all
    of its members say. Raises `DataFileError` for anything else, a weight between 0 and 1 among it.
    """
    if value is None:
        return None
    if isinstance(value, list):
        verdicts = {flag(member, what) for member in value} - {None}
        if len(verdicts) > 1:
            raise DataFileError(f"{what} says yes and no; a turn is trained as a whole or not at all")
        return verdicts.pop() if verdicts else None
    if value == "false":
        return False
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, int | float) and 0 < value < 1:
        raise DataFileError(f"{what} is {value}; a reply is trained or not, without a weight, so give 0 or 1")
    shown = repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}..."
    raise DataFileError(f"{what} is {shown}; it must be true or false, 1 or 0, or null")


def flag_of(fields: Mapping[str, Any], where: str) -> bool | None:
    """Return what the flags among some fields say, None if there are none. Raises `DataFileError`
    for a value that is no flag, and for flags that contradict each other.
    """
    verdicts = {name: flag(fields.get(name), f"{where}: {name}") for name in FLAGS}
    said = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    if len(set(said.values())) > 1:
        raise DataFileError(f"{where}: {' and '.join(said)} contradict each other about training; leave one out")
    return next(iter(said.values()), None)


def flagged(record: Mapping[str, Any], values: Sequence[Any], where: str) -> list[Any]:
    """Return turns with what their record says about training: a flag for all of them, or a list of
    one for each, as `agentr export --format trl` writes it beside token labels.

    Raises `DataFileError` for a list of another length, a value that is no flag, and flags that
    contradict those of a turn.
    """
    found = list(values)
    for name in FLAGS:
        flags = record.get(name)
        if isinstance(flags, list) and len(flags) != len(values):
            raise DataFileError(f"{where}: {name} has {len(flags)} flags for {len(values)} turns; give one for each")
        each = flags if isinstance(flags, list) else [flags] * len(values)
        for place, one in enumerate(each):
            here = f"{where}, turn {place}"
            verdict = flag(one, f"{where}: {name}" if one is flags else f"{here}: {name}")
            turn = found[place]
            if verdict is None or not isinstance(turn, dict):
                continue
            if flag_of(turn, here) not in (None, verdict):
                raise DataFileError(f"{here}: its flag and {name} of the record contradict each other about training")
            found[place] = {**turn, "train": verdict}
    return found


def untrained(turn: Any) -> Any:
    """Return a turn with the flag that it is not trained, in place of its own."""
    if not isinstance(turn, dict):
        return turn
    return {**{name: value for name, value in turn.items() if name not in FLAGS}, "train": False}
