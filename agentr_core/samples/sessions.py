"""Reading the session files of coding agents, JSONL files of one session each: Claude Code
(`~/.claude/projects/*/*.jsonl`), codex (`~/.codex/sessions/**/rollout-*.jsonl`) and pi
(`~/.pi/agent/sessions/*/*.jsonl`).

A session becomes one record, with turns, tool calls and their results as in OpenAI's protocol.
Source: files that Claude Code 2.1.332, codex 0.171.0 and pi 0.73.1 wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agentr_core.errors import DataFileError

AGENT_FIELD = "session_of"
"""The field of a session's record that names its coding agent."""
_LINES = "lines"
NOTE_FIELD = "agentr"
"""The field in which `agentr export` stores what the formats have no field for: in the first line
of a session, and in a tool definition of a Claude Code session.
"""
Line = Mapping[str, Any]
Turn = dict[str, Any]


def agent_of(text: str) -> str:
    """Return the name of the coding agent that wrote a session file, judged by the first line of
    its text; empty for any other file.
    """
    try:
        first = json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return ""
    if not isinstance(first, dict) or not isinstance(first.get("type"), str):
        return ""
    if first["type"] == "session_meta" and isinstance(first.get("payload"), dict):
        return "codex"
    if first["type"] == "session" and "cwd" in first:
        return "pi"
    if first["type"] == "file-history-snapshot" and "snapshot" in first:
        # An interactive session begins with it, and it names no session.
        return "Claude Code"
    if {"sessionId", "leafUuid", "parentUuid"} & first.keys() and not {"messages", "conversations"} & first.keys():
        return "Claude Code"
    return ""


def session_record(agent: str, lines: Sequence[Line], name: str) -> dict[str, Any]:
    """Return the lines of a session as one record; its `id` is `name`, that of the file."""
    note_fields = {"instance_id": key} if isinstance(key := _note(lines).get("instance_id"), str) else {}
    return {AGENT_FIELD: agent, "id": name, **note_fields, _LINES: list(lines)}


def _note(lines: Sequence[Line]) -> Line:
    note = lines[0].get(NOTE_FIELD) if lines else None
    return note if isinstance(note, dict) else {}


def session_as_conversation(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert the record of a session to one with `messages` and, if it defines any, `tools`; any
    other record is returned as it is.

    Raises `DataFileError` for a session that was compacted or rolled back, since what the agent
    read is then not one conversation, and for content that is not text.
    """
    if AGENT_FIELD not in record:
        return record
    system, turns, tools = _READERS[record[AGENT_FIELD]](record[_LINES], where)
    note = _note(record[_LINES])
    system, tools = system or note.get("system", ""), tools or note.get("tools", [])
    messages: list[Turn] = []
    instructions = [{"role": "system", "content": system}] if system else []
    for turn in [*instructions, *turns]:
        # Several user or system turns in a row become one, as the APIs of these agents treat them.
        if messages and turn["role"] == messages[-1]["role"] and turn["role"] in ("user", "system"):
            messages[-1] = {**turn, "content": f"{messages[-1]['content']}\n\n{turn['content']}"}
        else:
            messages.append(turn)
    return {"id": record["id"], "messages": messages, **({"tools": tools} if tools else {})}


def unread_fields(record: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the fields of a session's lines that have a value and are not read, and
    of the kinds of lines that are not read.
    """
    return frozenset(_unread(record[AGENT_FIELD], record[_LINES]))


def _text_of_blocks(content: Any, where: str, kinds: Sequence[str] = ("text", "input_text", "output_text")) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") not in kinds or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise DataFileError(f"{where} has content of type {kind}, and only texts are read; leave the session out")
    return "".join(block["text"] for block in blocks)


def _compacted_error(where: str) -> DataFileError:
    return DataFileError(
        f"{where}: the session was compacted or rolled back there, so what its agent read is not one conversation; "
        "leave it out"
    )


def _path_ids(lines: Sequence[Line], key: str, parent: str, last: Line) -> set[str]:
    """Return the ids of the line `last` and of its ancestors.

    Args:
        key, parent: the fields with the id of a line and with that of its parent.
    """
    parents = {line[key]: line.get(parent) for line in lines if key in line}
    path: set[str] = set()
    location = last.get(key)
    while location is not None and location not in path:
        path.add(location)
        location = parents.get(location)
    return path


# Claude Code: one line for each block of a reply; the lines of a reply share the id of its message.
# Lines form a tree; the results of several calls are siblings, one of which is the parent of the
# next reply.

_CLAUDE_BOUNDARIES = ("compact_boundary", "microcompact_boundary")
"""The kinds of lines after which the agent reads a summary in place of turns, or a note in place of
old results of calls.
"""


def read_claude_code(lines: Sequence[Line], where: str) -> tuple[str, list[Turn], list[Any]]:
    """Return the system text of a session, its turns, and the tools that it defines. Raises
    `DataFileError`.
    """
    turns: list[Turn] = []
    replies: dict[str, Turn] = {}
    for line in _claude_path(lines, where):
        message = line["message"]
        location = f"{where}, line {line.get('uuid')}"
        blocks = message.get("content")
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        if not isinstance(blocks, list):
            raise DataFileError(f"{location}: content must be a text or a list of blocks")
        if line["type"] == "assistant":
            name = str(message.get("id", line.get("uuid")))
            if name not in replies:
                replies[name] = {"role": "assistant", "content": "", "tool_calls": []}
                turns.append(replies[name])
            for block in blocks:
                kind = block.get("type") if isinstance(block, dict) else None
                if kind == "tool_use":
                    call = {"id": block.get("id"), "name": block.get("name"), "arguments": block.get("input")}
                    replies[name]["tool_calls"].append(call)
                elif kind not in ("thinking", "redacted_thinking"):
                    replies[name]["content"] += _text_of_blocks([block], location)
            continue
        results = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_result"]
        turns += [
            {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _text_of_blocks(block.get("content") or "", location),
            }
            for block in results
        ]
        if len(results) < len(blocks):
            other_blocks = [block for block in blocks if block not in results]
            turns.append({"role": "user", "content": _text_of_blocks(other_blocks, location)})
    system, tools = "", []
    for line in lines:
        attachment = line.get("attachment")
        if isinstance(attachment, dict) and attachment.get("type") == "prompt_snapshot":
            parts = [attachment.get("cliPrefix"), *attachment.get("systemPrompt", ())]
            system = "\n\n".join(part for part in parts if isinstance(part, str))
            tools = [tool_definition(tool) for tool in attachment.get("tools", ())]
    return system, turns, tools


def _claude_path(lines: Sequence[Line], where: str) -> list[Line]:
    """Return the lines of the main conversation that ends with the last line, in order: its
    ancestors, and the other lines of the same replies and of the results of their calls. Lines of
    subagents are used only if there are no others.

    Raises `DataFileError` if the session was compacted.
    """
    if any(line.get("isCompactSummary") or line.get("subtype") in _CLAUDE_BOUNDARIES for line in lines):
        raise _compacted_error(where)
    # Claude Code writes API errors as replies of the model.
    rows = [
        line
        for line in lines
        if line.get("type") in ("user", "assistant")
        and isinstance(line.get("message"), dict)
        and not line.get("isApiErrorMessage")
    ]
    main = [line for line in rows if not line.get("isSidechain")] or rows
    if not main:
        return []
    path = _path_ids(lines, "uuid", "parentUuid", main[-1])
    replies = {line["message"].get("id") for line in main if line.get("uuid") in path and line["type"] == "assistant"}
    calls = {
        block.get("id")
        for line in main
        if line["message"].get("id") in replies and isinstance(line["message"].get("content"), list)
        for block in line["message"]["content"]
        if isinstance(block, dict)
    } - {None}
    return [
        line
        for line in main
        if line.get("uuid") in path
        or (line["type"] == "assistant" and line["message"].get("id") in replies)
        or any(key in calls for key in _answered_call_ids(line))
    ]


def _answered_call_ids(line: Line) -> list[Any]:
    content = line["message"].get("content")
    blocks = content if isinstance(content, list) else []
    return [block.get("tool_use_id") for block in blocks if isinstance(block, dict)]


def tool_definition(tool: Any) -> dict[str, Any]:
    """Return the definition of a tool in a Claude Code session in the form of OpenAI's protocol."""
    if isinstance(tool, dict) and isinstance(tool.get(NOTE_FIELD), dict):
        return dict(tool[NOTE_FIELD])
    schema = tool.get("schema", tool) if isinstance(tool, dict) else {}
    description_field = {"description": schema["description"]} if isinstance(schema.get("description"), str) else {}
    parameters = schema.get("input_schema") or {"type": "object"}
    return {"type": "function", "function": {"name": schema.get("name"), **description_field, "parameters": parameters}}


# Codex: a line about the session, then the items of its requests, one on each line.

_CODEX_REPLY_PARTS = ("message", "function_call", "custom_tool_call")
_CODEX_RESULTS = ("function_call_output", "custom_tool_call_output")


def read_codex(lines: Sequence[Line], where: str) -> tuple[str, list[Turn], list[Any]]:
    """Return the system text of a session, its turns, and the tools that it defines. Raises
    `DataFileError`.
    """
    instructions = lines[0]["payload"].get("base_instructions")
    system = instructions.get("text") if isinstance(instructions, dict) else instructions
    turns: list[Turn] = []
    for number, line in enumerate(lines, start=1):
        item = line.get("payload")
        location = f"{where}, line {number}"
        kind = item.get("type") if isinstance(item, dict) else None
        if line.get("type") == "compacted" or kind in ("compaction", "context_compacted", "thread_rolled_back"):
            raise _compacted_error(location)
        if line.get("type") == "response_item" and isinstance(item, dict):
            turns += codex_turns(item, kind, turns, location)
    return system if isinstance(system, str) else "", turns, []


def codex_turns(item: Line, kind: Any, turns: Sequence[Turn], where: str) -> Iterator[Turn]:
    """Yield the turn of an item of `kind`. An item that continues the last reply of `turns` is
    added to that turn, in place; an item that is no turn, such as reasoning, yields nothing.

    Raises `DataFileError` for content that is not text, and for a local shell call.
    """
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if kind == "message" and role != "assistant":
        yield {"role": role, "content": _text_of_blocks(item.get("content"), where)}
    elif kind in _CODEX_RESULTS:
        output = item.get("output")
        text = output.get("content") if isinstance(output, dict) else output
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text_of_blocks(text, where)}
    elif kind in _CODEX_REPLY_PARTS:
        reply: Turn = {"role": "assistant", "content": "", "tool_calls": []}
        if turns and turns[-1]["role"] == "assistant":
            reply = turns[-1]
        else:
            yield reply
        if kind == "message":
            # Messages of one reply, such as a comment and the answer, are sent one by one.
            texts = (reply["content"], _text_of_blocks(item.get("content"), where))
            reply["content"] = "\n\n".join(filter(None, texts))
        else:
            # A custom call has a text instead of an object of arguments.
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            reply["tool_calls"].append({"id": item.get("call_id"), "name": item.get("name"), "arguments": arguments})
    elif kind == "local_shell_call":
        raise DataFileError(f"{where} is a {kind}, which has no arguments; leave the session out")


# Pi: a tree of entries; the last one is where the session ended.


def read_pi(lines: Sequence[Line], where: str) -> tuple[str, list[Turn], list[Any]]:
    """Return the system text of a session, its turns, and the tools that it defines. Raises
    `DataFileError`.
    """
    path = _pi_path(lines)
    turns: list[Turn] = []
    for number, entry in enumerate(lines, start=1):
        location = f"{where}, line {number}"
        if id(entry) not in path:
            continue
        if entry.get("type") in ("compaction", "branch_summary"):
            raise _compacted_error(location)
        if entry.get("type") == "custom_message":
            turns.append({"role": "user", "content": _text_of_blocks(entry.get("content"), location)})
        elif entry.get("type") == "message" and isinstance(entry.get("message"), dict):
            turns += pi_turns(entry["message"], location)
    return "", turns, []


def _pi_path(lines: Sequence[Line]) -> set[int]:
    """Return the Python ids (`id()`) of the lines that are the last entry and its ancestors."""
    # Version 1 has no tree.
    path = _path_ids(lines, "id", "parentId", lines[-1]) if "id" in lines[-1] else None
    return {id(line) for line in lines[1:] if path is None or line.get("id") in path}


def pi_turns(message: Line, where: str) -> Iterator[Turn]:
    """Yield the turn of a message of pi, unless it is excluded from the model's context. Raises
    `DataFileError` for a failed reply, a role that is no turn, and content that is not text.
    """
    role, content = message.get("role"), message.get("content")
    if role == "assistant" and isinstance(content, list):
        if message.get("stopReason") in ("error", "aborted"):
            raise DataFileError(f"{where}: the reply ended with {message['stopReason']}; leave the session out")
        blocks = [block for block in content if isinstance(block, dict) and block.get("type") != "thinking"]
        calls = [block for block in blocks if block.get("type") == "toolCall"]
        yield {
            "role": "assistant",
            "content": _text_of_blocks([block for block in blocks if block not in calls], where),
            "tool_calls": [{name: call.get(name) for name in ("id", "name", "arguments")} for call in calls],
        }
    elif role == "toolResult":
        yield {"role": "tool", "tool_call_id": message.get("toolCallId"), "content": _text_of_blocks(content, where)}
    elif role in ("user", "custom"):
        yield {"role": "user", "content": _text_of_blocks(content, where)}
    elif not message.get("excludeFromContext"):
        raise DataFileError(f"{where} is a message of {role}, which is no turn; leave the session out")


Reader = Callable[[Sequence[Line], str], tuple[str, list[Turn], list[Any]]]
"""Returns the system text of a session, its turns, and the tools that it defines."""
_READERS: Mapping[str, Reader] = MappingProxyType({"Claude Code": read_claude_code, "codex": read_codex, "pi": read_pi})


# The fields of a session's lines that are read, by agent and type of line; others are reported.

_READ_FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Claude Code": {
            "user": ("type", "uuid", "parentUuid", "message.role", "message.content"),
            "assistant": ("type", "uuid", "parentUuid", "message.role", "message.content", "message.id"),
        },
        "codex": {
            "session_meta": ("type", "payload.base_instructions"),
            "response_item": (
                *("type", "payload.type", "payload.role", "payload.content", "payload.call_id", "payload.name"),
                *("payload.arguments", "payload.input", "payload.output"),
            ),
        },
        "pi": {
            "message": (
                *("type", "id", "parentId", "message.role", "message.content", "message.toolCallId"),
                "message.stopReason",
            ),
            "custom_message": ("type", "id", "parentId", "content"),
        },
    }
)


def _unread(agent: str, lines: Sequence[Line]) -> Iterator[str]:
    claude = [id(line) for line in _claude_path(lines, "")] if agent == "Claude Code" else None
    kept_ids = claude if claude is not None else _pi_path(lines) if agent == "pi" else None
    yield from (f"{NOTE_FIELD}.{name}" for name in unused_fields(_note(lines), ("instance_id", "system", "tools")))
    for line in lines:
        kind = str(line.get("type"))
        item = line.get("payload")
        part = item.get("type") if kind == "response_item" and isinstance(item, dict) else None
        if kept_ids is not None and kind in _READ_FIELDS[agent] and id(line) not in kept_ids:
            yield "lines of subagents, branches and errors"
        elif kind not in _READ_FIELDS[agent]:
            yield "attachment" if kind == "attachment" else kind
        elif part not in (None, *_CODEX_REPLY_PARTS, *_CODEX_RESULTS):
            yield f"{kind}.{part}"
        else:
            yield from (f"{kind}.{name}" for name in unused_fields(line, (*_READ_FIELDS[agent][kind], NOTE_FIELD)))
        message = line.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") in ("thinking", "redacted_thinking"):
                yield f"{kind}.thinking"


def unused_fields(line: Line, used_fields: Sequence[str]) -> Iterator[str]:
    """Yield the names of the fields of a line that have a value and are not in `used_fields`. If
    only a part of an object is used, as with "message.role", yield its other parts in that form.
    """
    for name, value in line.items():
        parts = {field.partition(".")[2] for field in used_fields if field.startswith(f"{name}.")}
        if parts and isinstance(value, dict):
            yield from (f"{name}.{part}" for part, inner in value.items() if part not in parts and _has_value(inner))
        elif name not in used_fields and _has_value(value):
            yield name


def _has_value(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})
