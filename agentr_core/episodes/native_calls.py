"""Tool calls as written by chat models that were trained on tools: a JSON object between two marks,
in a turn of its own.

    I look it up.
    <tool_call>
    {"name": "search", "arguments": {"query": "Ostra"}}
    </tool_call>

Models of the Qwen and Hermes families write this; a server of OpenAI's protocol reports the same in
fields of its own, which `models.openai.tool_calls` translates. A reply has at most one call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import Turns, instruction_of, with_system
from agentr_core.errors import ConfigError
from agentr_core.texts import json_end, lone_surrogate, outside_thoughts
from agentr_core.types import Message, Step

OPENS: Final = "<tool_call>"
CLOSES: Final = "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a model is offered. Each of its arguments, given as name and description, is a
    required text.
    """

    name: str
    description: str
    arguments: tuple[tuple[str, str], ...]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as OpenAI's protocol and chat templates define a function."""
        properties = {name: {"type": "string", "description": description} for name, description in self.arguments}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }


class NativeCall(NamedTuple):
    """A call in a reply, and what the reply says beside it."""

    name: str
    arguments: Mapping[str, Any]
    beside: str


class Misread(NamedTuple):
    """What is wrong with a call that cannot be read; nothing of the reply is repeated."""

    why: str


def definitions(tools: Sequence[Tool]) -> str:
    """Return the text of a turn of role `tools`: the definitions as a JSON list."""
    return json.dumps([tool.definition for tool in tools], ensure_ascii=False)


def read_call(reply: str) -> NativeCall | Misread | None:
    """Return the call in a reply, or None if it has none; what a thought considers is no call.
    Never raises.
    """
    plain = outside_thoughts(reply)
    before, opening, rest = plain.partition(OPENS)
    if not opening:
        return Misread("a call ends that was not opened") if CLOSES in plain else None
    # Code may print the marks, and small models break lines in it without escaping them.
    end = rest.find(CLOSES, json_end(rest, len(rest) - len(rest.lstrip())))
    if end < 0:
        return Misread(f"it does not end with {CLOSES}")
    inside, after = rest[:end], rest[end + len(CLOSES) :]
    try:
        call = json.loads(inside, strict=False)
    except (ValueError, RecursionError):
        several = OPENS in inside or OPENS in after
        return Misread("there are several calls, and a reply may have one" if several else "it is not valid JSON")
    if OPENS in after:
        return Misread("there are several calls, and a reply may have one")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Misread('it is no JSON object with "name" and "arguments"')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return Misread('its "arguments" are no JSON object')
    text = reply[: len(before)] + reply[len(reply) - len(after) :]
    return NativeCall(call["name"], arguments, text.strip())


def text_arguments(call: NativeCall, tools: Sequence[Tool]) -> dict[str, str] | Misread:
    """Return the arguments of a call of one of the given tools; a `Misread` if there is no such
    tool, or its arguments are others.
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return Misread(f"there is no such tool; there are {', '.join(tool.name for tool in tools)}")
    names = [name for name, _ in tool.arguments]
    if call.arguments.keys() != set(names):
        return Misread(f"{tool.name} takes the arguments {', '.join(names)}")
    texts = {name: value for name, value in call.arguments.items() if isinstance(value, str)}
    if len(texts) < len(names):
        return Misread("an argument is no text")
    if any(lone_surrogate(value) is not None for value in texts.values()):
        return Misread("an argument has half a surrogate pair, which is no text")
    return texts


def call_text(name: str, arguments: str, *, beside: str = "") -> str:
    """Return the reply that calls a tool with arguments, given as JSON, after the text `beside`."""
    call = f'{OPENS}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CLOSES}'
    return f"{beside}\n{call}" if beside else call


def calling(tool: Tool, *texts: str, beside: str = "") -> str:
    """Return the reply that calls a tool with texts as its arguments, in their order."""
    arguments = dict(zip((name for name, _ in tool.arguments), texts, strict=True))
    return call_text(tool.name, json.dumps(arguments, ensure_ascii=False), beside=beside)


# The transcript of native tool calls: messages with tools, as OpenAI's protocol has them.
#
# tools    system        user                assistant   tool     assistant   user      assistant
# tools  | instruction | first observation | call      | result | no call   | answer  | ...
#
# A turn of role `tools` comes first; its text is the JSON list of their definitions. A chat
# template is given that list as `tools`, and so is a server. The result of a call is a turn of role
# `tool`; the observation after a reply without a readable call is a user turn.


# A call stays the text that was sampled, so that its tokens are trained as they were; only the
# adapter of OpenAI's protocol makes fields of it, and text of fields.
@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTurns(Turns):
    """Reply and result in turns, after tools, instruction and first observation.

    Args:
        tools: what the model is offered, at least one.
        note: goes after the world's instruction.
    """

    tools: tuple[Tool, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.tools:
            raise ConfigError("a world without tools has nothing to call; leave transcript: native out")

    def opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        """Return the definitions of the tools, then instruction and first observation."""
        return (
            Message(role="tools", text=definitions(self.tools)),
            Message(role="system", text=with_system(env, "\n\n".join(filter(None, (instruction_of(env), self.note))))),
            Message(role="user", text=first_observation),
        )

    def result(self, step: Step) -> Message:
        """Return the result of a call, or what was said where none could be read."""
        called = isinstance(read_call(step.reply), NativeCall)
        return Message(role="tool" if called else "user", text=step.observation)
