"""General chat data in a file: one JSON object with a conversation on each line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from agentr_core.samples.json_lines import records
from agentr_core.samples.record_turns import conversation
from agentr_core.types import Message, Provenance, Rejection, Role, Sample, SampleKind

STAGE = "general"


def read_chat(path: Path) -> tuple[tuple[Sample, ...], tuple[Rejection, ...]]:
    """Return the conversations of a file as samples with every assistant turn trained, and the
    rejections of unusable ones.

    A record is `{"messages": [{"role", "content"}, ...]}`, ShareGPT's `{"conversations": [{"from",
    "value"}, ...]}`, TRL's `prompt` and `completion` or a trajectory in ATIF; they are lines of
    JSON or one array. A turn whose flag `train`, `loss` or `weight` says no is not trained. A
    conversation is unusable, and rejected by its line, when its user and assistant turns do not
    alternate from a user turn on (where tools are defined: a reply comes first or after another), a
    turn is empty, or no turn of the assistant is trained.

    Raises:
        DataFileError: the file cannot be read, or a line has a different form; the message names
            file and line.
    """
    samples, rejections = [], []
    for number, record in records(path, setting="data.general.file"):
        messages = conversation(record, f"{path}:{number}")
        fault = fault_of(messages)
        if fault:
            rejections.append(Rejection(stage=STAGE, subject=f"{path.name}:{number}", reason=fault))
        else:
            origin = Provenance(extra={"file": path.name, "line": number})
            samples.append(Sample(kind=SampleKind.GENERAL, messages=messages, instance=None, provenance=origin))
    return tuple(samples), tuple(rejections)


def fault_of(messages: tuple[Message, ...]) -> str:
    """Return in a word why a conversation is unusable; the empty string for one that can be trained
    on.
    """
    if not any(message.train for message in messages):
        return "no-assistant-turn"
    tools = messages[0].role == "tools"
    told = messages[1:] if tools else messages
    spoken = [message.role for message in (told[1:] if told[0].role == "system" else told)]
    if _doubled(spoken) if tools else _irregular(spoken):
        return "turns-do-not-alternate"
    return "" if all(message.text.strip() for message in messages) else "empty-turn"


def _irregular(roles: Sequence[Role]) -> bool:
    return any(role != ("user", "assistant")[number % 2] for number, role in enumerate(roles))


def _doubled(roles: Sequence[Role]) -> bool:
    """Return whether a reply comes first or right after another; one may have several results."""
    return any(role == before == "assistant" for before, role in pairwise(("assistant", *roles)))
