"""Translates native tool calls between our turns and the fields of OpenAI's protocol.

Our turns hold a call as text, which `episodes.native_calls` reads. The protocol has calls in
`tool_calls` of the assistant's message, each with an id that the message with its result repeats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agentr_core.episodes.native_calls import NativeCall, call_text, read_call
from agentr_core.types import Message


class ToldCall(NamedTuple):
    """A call as a server reports it; its arguments are JSON, or the model's attempt at it."""

    name: str
    arguments: str


def offered(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the fields of a request that offer the tools of a conversation; none if it has no
    tools.
    """
    if not messages or messages[0].role != "tools":
        return {}
    return {"tools": json.loads(messages[0].text), "parallel_tool_calls": False}


def tool_names(messages: Sequence[Message]) -> list[str]:
    """Return the names of the tools of a conversation, or the type of one that is no function: an
    agent of the gateway may offer any.
    """
    tools = offered(messages).get("tools", ())
    return [str((tool.get("function") or {}).get("name") or tool.get("type")) for tool in tools]


def argument_text(arguments: str | Mapping[str, Any] | None) -> str:
    """Return the arguments of a call as JSON; the protocol has them so, but some programs send the
    object itself, or nothing where there are none.
    """
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a request. A call that cannot be read, or whose result a window left
    out, is sent as plain text; so is a result without its call.
    """
    turns = [message for message in messages if message.role != "tools"]
    made: list[dict[str, Any]] = []
    for place, message in enumerate(turns):
        answered = place + 1 < len(turns) and turns[place + 1].role == "tool"
        call = read_call(message.text) if message.role == "assistant" and answered else None
        if isinstance(call, NativeCall):
            made.append(_calling(call, _id(place)))
        elif message.role == "tool" and "tool_calls" in made[-1]:
            made.append({"role": "tool", "tool_call_id": _id(place - 1), "content": message.text})
        else:
            made.append({"role": "user" if message.role == "tool" else message.role, "content": message.text})
    return made


def reply_text(content: str, calls: Iterable[ToldCall]) -> str:
    """Return a reply as the text that the world reads: its content, then its calls."""
    text = content.strip() if (told := list(calls)) else content
    for name, arguments in told:
        text = call_text(name, arguments.strip() or "{}", beside=text)
    return text


def _calling(call: NativeCall, name: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    told = {"id": name, "type": "function", "function": function}
    return {"role": "assistant", "content": call.beside, "tool_calls": [told]}


def _id(position: int) -> str:
    """Return the id of the call in the message at a position; some servers require nine letters and
    digits.
    """
    return f"call{position:05}"
