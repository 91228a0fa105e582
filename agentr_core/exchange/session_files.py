"""Export as session files of the coding agents Claude Code, codex and pi, which can resume them: a
JSONL file for each sample.

Source: files that Claude Code 2.1.332, codex 0.171.0 and pi 0.73.1 wrote, and the requests that
these programs sent to a model when they resumed files of this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5

from agentr_core.episodes.transcript import readable_calls
from agentr_core.exchange.training_set import SampleRow, TrainingSet, file_keys
from agentr_core.samples.chat_file import reply_text
from agentr_core.samples.sessions import NOTE_FIELD
from agentr_core.types import Message, Sample

_FOLDER = "sessions"
_TIME = "1970-01-01T00:00:00.000Z"
"""A placeholder: the programs require a time, and a sample has none."""
_CWD = "/"
"""A placeholder for the working directory, which the programs require."""
_MODEL = "agentr"
Line = dict[str, Any]


class Call(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: Mapping[str, Any]


class Turn(NamedTuple):
    """A turn of a session. `calls` are the tool calls of a reply, which are not in its `text`. A
    `tool` turn has the result of `answered_call`; in other turns that is None.
    """

    role: str
    text: str
    calls: Sequence[Call] = ()
    answered_call: Call | None = None


class Session(NamedTuple):
    """A sample as a session: its system text, its tools in the form of OpenAI's protocol, its
    turns, and in `note` the fields that the programs do not have.
    """

    id: UUID
    system: str
    tools: Sequence[Any]
    turns: Sequence[Turn]
    note: Mapping[str, Any]


def session_of(row: SampleRow) -> Session:
    """Return the session of a sample. `why_impossible` must have returned "" for its set."""
    messages = row.sample.messages
    tools = json.loads(messages[0].text) if messages[0].role == "tools" else []
    system = next((message.text for message in messages[:2] if message.role == "system"), "")
    instance = row.sample.instance
    note = {
        "id": row.id,
        "kind": str(row.sample.kind),
        **row.origin,
        "instance_id": None if instance is None else instance.key,
    }
    turns = list(_turns(row.sample))
    return Session(uuid5(NAMESPACE_OID, row.id), system, tools, turns, note)


def _turns(sample: Sample) -> Iterator[Turn]:
    calls: list[Call] = []
    for position, message in enumerate(_without_context(sample)):
        if message.role == "assistant":
            reply_calls = _calls_of_reply(sample, message)
            calls = [Call(f"call_{position}_{index}", *call) for index, (_, call) in enumerate(reply_calls)]
            yield Turn("assistant", reply_calls[0][0] if reply_calls else message.text, tuple(calls))
        elif message.role == "tool":
            yield Turn("tool", message.text, answered_call=calls.pop(0))
        else:
            yield Turn(message.role, message.text)


def _without_context(sample: Sample) -> Sequence[Message]:
    """Return the turns of a sample after its `tools` turn and its system turn."""
    messages = sample.messages
    start = int(messages[0].role == "tools")
    return messages[start + (messages[start].role == "system") :]


def _calls_of_reply(sample: Sample, reply: Message) -> list[tuple[str, tuple[str, Mapping[str, Any]]]]:
    """Return each call in a reply as the reply's text outside of all calls, and the call's name and
    arguments. Empty if the sample has no tools, or a number in a call is not finite, which JSON
    cannot express.
    """
    calls = readable_calls(reply.text) if sample.messages[0].role == "tools" else ()
    try:
        json.dumps([dict(call.arguments) for call in calls], allow_nan=False)
    except ValueError:
        return []
    return [(call.text_outside, (call.name, dict(call.arguments))) for call in calls]


def why_impossible(training_set: TrainingSet) -> str:
    """Return why a training set cannot be written as sessions; empty if it can."""
    if training_set.pairs:
        return "it has no form for preference pairs; choose parquet, trl, sharegpt or atif"
    for row in training_set.samples:
        turns, num_open_calls = _without_context(row.sample), 0
        if any(message.spans for message in turns):
            return "its replies are whole turns, and these were grown by continuation; choose parquet, trl or sharegpt"
        if any(message.role == "system" for message in turns) or any(
            before.role == after.role != "tool" for before, after in pairwise(turns)
        ):
            return "the user and the model must take turns; choose parquet, trl or sharegpt"
        for message in turns:
            num_reply_calls = len(_calls_of_reply(row.sample, message)) if message.role == "assistant" else 0
            num_open_calls = num_open_calls - 1 if message.role == "tool" else num_reply_calls
            if num_open_calls < 0:
                return "some results of tools answer no call; choose parquet, trl or sharegpt"
    return ""


def untrained_replies_note(training_set: TrainingSet) -> str:
    """Return a note on how many replies are not trained, which a session cannot express; empty if
    none.
    """
    replies = [
        message for row in training_set.samples for message in row.sample.messages if message.role == "assistant"
    ]
    count = sum(not message.train for message in replies)
    return f"{count} replies carry none, and a session has no flags" if count else ""


def respelt_calls_note(training_set: TrainingSet) -> str:
    """Return a note on how many replies lose the exact text of their calls; empty if none do."""
    count = sum(
        reply_text(reply_calls[0][0], [call for _, call in reply_calls]) != message.text
        for row in training_set.samples
        for message in row.sample.messages
        if message.role == "assistant" and (reply_calls := _calls_of_reply(row.sample, message))
    )
    return f"left out is how {count} replies spell their calls, of which names and arguments are there" if count else ""


def note_field_note(training_set: TrainingSet) -> str:
    """Return a note on the field that holds what the programs have no field for."""
    return f"the ids behind a sample stand in a field `{NOTE_FIELD}` of the first line, which the program passes over"


def codex_tools_note(training_set: TrainingSet) -> str:
    """Return a note on how many samples have tools, which codex does not read; empty if none."""
    count = sum(row.sample.messages[0].role == "tools" for row in training_set.samples)
    return f"codex offers its own tools in place of those of {count} samples" if count else ""


def pi_tools_note(training_set: TrainingSet) -> str:
    """Return a note on how many samples have tools or a system text, which pi does not read; empty
    if none.
    """
    count = sum(row.sample.messages[0].role in ("tools", "system") for row in training_set.samples)
    return f"pi has its own tools and system text in place of those of {count} samples" if count else ""


def write_claude_code(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `ID.jsonl` for each sample, as in `~/.claude/projects/*`."""
    return _write(training_set, folder, "{}.jsonl", claude_code_lines)


def write_codex(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `rollout-TIME-ID.jsonl` for each sample, as in `~/.codex/sessions/**`."""
    return _write(training_set, folder, "rollout-1970-01-01T00-00-00-{}.jsonl", codex_lines)


def write_pi(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `TIME_ID.jsonl` for each sample, as in `~/.pi/agent/sessions/*`."""
    return _write(training_set, folder, "1970-01-01T00-00-00-000Z_{}.jsonl", pi_lines)


def _write(
    training_set: TrainingSet, folder: Path, name: str, lines: Callable[[Session], Iterable[Line]]
) -> Mapping[str, str]:
    """Write a session file for each sample. Return an empty mapping: the files are no data set that
    `datasets` could load.
    """
    (folder / _FOLDER).mkdir()
    for key, row in zip(file_keys(training_set), training_set.samples, strict=True):
        session = session_of(row)._replace(id=uuid5(NAMESPACE_OID, key))
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines(session))
        (folder / _FOLDER / name.format(session.id)).write_text(text, encoding="utf-8")
    return {}


def claude_code_lines(session: Session) -> Iterator[Line]:
    """Yield the lines of a session file of Claude Code; the parent of each is the line before."""
    note, parent = {NOTE_FIELD: session.note}, None
    for number, line in enumerate(_claude_rows(session)):
        key = str(uuid5(session.id, str(number)))
        yield {
            "parentUuid": parent,
            "isSidechain": False,
            **line,
            "uuid": key,
            "timestamp": _TIME,
            "userType": "external",
            "cwd": _CWD,
            "sessionId": str(session.id),
            "version": "2.1.332",
            **note,
        }
        note, parent = {}, key


def _claude_rows(session: Session) -> Iterator[Line]:
    """Yield the lines of a session without the fields that all lines have: system text and tools,
    if any, then one line for each other turn and for each block of a reply.
    """
    if session.system or session.tools:
        snapshot = {
            "type": "prompt_snapshot",
            "systemPrompt": [session.system] if session.system else [],
            "tools": [
                {
                    "name": tool["function"]["name"],
                    "schema": {
                        "name": tool["function"]["name"],
                        "description": tool["function"].get("description", ""),
                        "input_schema": tool["function"].get("parameters", {"type": "object"}),
                    },
                    NOTE_FIELD: tool,
                }
                for tool in session.tools
            ],
        }
        yield {"type": "attachment", "attachment": snapshot}
    for number, turn in enumerate(session.turns):
        if turn.role != "assistant":
            content = _text_blocks(turn.text)
            if turn.answered_call is not None:
                content = [{"type": "tool_result", "tool_use_id": turn.answered_call.id, "content": turn.text}]
            yield {"type": "user", "message": {"role": "user", "content": content}}
            continue
        uses = [{"type": "tool_use", "id": id, "name": name, "input": arguments} for id, name, arguments in turn.calls]
        for block in [*(_text_blocks(turn.text) if turn.text or not uses else ()), *uses]:
            message = {
                "id": f"msg_{uuid5(session.id, f'reply {number}').hex}",
                "type": "message",
                "role": "assistant",
                "model": _MODEL,
                "content": [block],
                "stop_reason": "tool_use" if uses else "end_turn",
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }
            yield {"type": "assistant", "message": message}


def codex_lines(session: Session) -> Iterator[Line]:
    """Yield the lines of a session file of codex: the metadata, then the items of its requests."""
    head = {
        "id": str(session.id),
        "timestamp": _TIME,
        "cwd": _CWD,
        "originator": "agentr",
        "cli_version": "0.171.0",
        "source": "exec",
        "base_instructions": {"text": session.system} if session.system else None,
    }
    tools = {"tools": session.tools} if session.tools else {}
    yield {"timestamp": _TIME, "type": "session_meta", "payload": head, NOTE_FIELD: {**session.note, **tools}}
    for turn in session.turns:
        for item in _codex_items(turn):
            yield {"timestamp": _TIME, "type": "response_item", "payload": item}


def _codex_items(turn: Turn) -> Iterator[Line]:
    if turn.answered_call is not None:
        yield {"type": "function_call_output", "call_id": turn.answered_call.id, "output": turn.text}
        return
    if turn.text or not turn.calls:
        kind = "output_text" if turn.role == "assistant" else "input_text"
        yield {"type": "message", "role": turn.role, "content": _text_blocks(turn.text, kind)}
    for call in turn.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        yield {"type": "function_call", "name": call.name, "arguments": arguments, "call_id": call.id}


def pi_lines(session: Session) -> Iterator[Line]:
    """Yield the lines of a session file of pi: the metadata, then messages in a tree without
    branches.
    """
    tools = {"tools": session.tools} if session.tools else {}
    system = {"system": session.system} if session.system else {}
    yield {
        "type": "session",
        "version": 3,
        "id": str(session.id),
        "timestamp": _TIME,
        "cwd": _CWD,
        NOTE_FIELD: {**session.note, **tools, **system},
    }
    parent = None
    for number, turn in enumerate(session.turns):
        key = f"{number:08x}"
        yield {
            "type": "message",
            "id": key,
            "parentId": parent,
            "timestamp": _TIME,
            "message": {**_pi_message(turn), "timestamp": 0},
        }
        parent = key


def _pi_message(turn: Turn) -> Line:
    if turn.answered_call is not None:
        call_fields = {"toolCallId": turn.answered_call.id, "toolName": turn.answered_call.name, "isError": False}
        return {"role": "toolResult", **call_fields, "content": _text_blocks(turn.text)}
    if turn.role == "user":
        return {"role": "user", "content": _text_blocks(turn.text)}
    calls = [{"type": "toolCall", "id": id, "name": name, "arguments": arguments} for id, name, arguments in turn.calls]
    counts = ("input", "output", "cacheRead", "cacheWrite")
    return {
        "role": "assistant",
        "content": [*(_text_blocks(turn.text) if turn.text or not calls else ()), *calls],
        "api": "openai-completions",
        "provider": "agentr",
        "model": _MODEL,
        "usage": {
            **dict.fromkeys(counts, 0),
            "totalTokens": 0,
            "cost": dict.fromkeys((*counts, "total"), 0),
        },
        "stopReason": "toolUse" if calls else "stop",
    }


def _text_blocks(text: str, kind: str = "text") -> list[Line]:
    return [{"type": kind, "text": text}]
