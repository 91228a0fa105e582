"""General chat data in a file: one JSON object with a conversation on each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.types import Message, Provenance, Rejection, Role, Sample, SampleKind

STAGE = "general"

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_LAYOUTS = (("messages", "role", "content"), ("conversations", "from", "value"))


def read_chat(path: Path) -> tuple[tuple[Sample, ...], tuple[Rejection, ...]]:
    """Return the conversations of a JSONL file as samples with every assistant turn trained, and those of no use.

    A line is `{"messages": [{"role", "content"}, ...]}` or ShareGPT's `{"conversations": [{"from", "value"}, ...]}`;
    blank lines are passed over. A conversation is of no use, and rejected by its line, when its user and assistant
    turns do not alternate from a user turn on, a turn is empty, or the assistant never speaks.

    Raises:
        DataFileError: the file cannot be read, or a line has another form; the message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(
            f"chat file {path} cannot be read: {error}; set data.general.file to a JSONL file"
        ) from error
    samples, rejections = [], []
    # Not splitlines(): JSON strings may hold other line ends, such as U+2028, as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        messages = _messages(line, f"{path}:{number}")
        fault = _fault(messages)
        if fault:
            rejections.append(Rejection(stage=STAGE, subject=f"{path.name}:{number}", reason=fault))
        else:
            origin = Provenance(extra={"file": path.name, "line": number})
            samples.append(Sample(kind=SampleKind.GENERAL, messages=messages, instance=None, provenance=origin))
    return tuple(samples), tuple(rejections)


def _messages(line: str, where: str) -> tuple[Message, ...]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataFileError(f"{where} is not JSON ({error}); write one object on each line") from error
    for key, role_key, text_key in _LAYOUTS:
        if isinstance(record, dict) and isinstance(record.get(key), list):
            return tuple(_message(turn, role_key, text_key, f"{where}, turn {i}") for i, turn in enumerate(record[key]))
    raise DataFileError(f'{where} has no list of turns under "messages" or "conversations"; add one')


def _message(turn: Any, role_key: str, text_key: str, where: str) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get(text_key), str):
        raise DataFileError(f'{where}: a turn must be an object with the texts "{role_key}" and "{text_key}"')
    role = turn.get(role_key)
    if not isinstance(role, str) or role not in _ROLES:
        raise DataFileError(f"{where}: {role_key} is {role!r} and must be one of {', '.join(_ROLES)}")
    return Message(role=_ROLES[role], text=turn[text_key], train=_ROLES[role] == "assistant")


def _fault(messages: tuple[Message, ...]) -> str:
    spoken = [m.role for m in (messages[1:] if messages and messages[0].role == "system" else messages)]
    if "assistant" not in spoken:
        return "no-assistant-turn"
    if any(role != ("user", "assistant")[number % 2] for number, role in enumerate(spoken)):
        return "turns-do-not-alternate"
    return "" if all(message.text.strip() for message in messages) else "empty-turn"
