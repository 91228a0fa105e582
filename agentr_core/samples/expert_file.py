"""Demonstrations in a file: an expert's replies, to be played again in the environment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.json_lines import World, instance_of, number_of, records
from agentr_core.samples.record_fields import holds
from agentr_core.samples.record_turns import conversation
from agentr_core.types import Instance


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
