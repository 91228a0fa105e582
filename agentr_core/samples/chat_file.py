"""General chat data in a file: one JSON object with a conversation on each line."""

from __future__ import annotations

from pathlib import Path

from agentr_core.samples.json_lines import conversation, records
from agentr_core.types import Message, Provenance, Rejection, Sample, SampleKind

STAGE = "general"


def read_chat(path: Path) -> tuple[tuple[Sample, ...], tuple[Rejection, ...]]:
    """Return the conversations of a file as samples with every assistant turn trained, and the
    rejections of unusable ones.

    A record is `{"messages": [{"role", "content"}, ...]}`, ShareGPT's `{"conversations": [{"from",
    "value"}, ...]}` or a trajectory in ATIF; they are lines of JSON or one array. A turn whose flag
    `train`, or `loss`, is false is not trained. A conversation is unusable, and rejected by its
    line, when its user and assistant turns do not alternate from a user turn on, a turn is empty,
    or no turn of the assistant is trained.

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
    spoken = [m.role for m in (messages[1:] if messages and messages[0].role == "system" else messages)]
    if not any(message.train for message in messages):
        return "no-assistant-turn"
    if any(role != ("user", "assistant")[number % 2] for number, role in enumerate(spoken)):
        return "turns-do-not-alternate"
    return "" if all(message.text.strip() for message in messages) else "empty-turn"
