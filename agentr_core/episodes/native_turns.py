"""The transcript of native tool calls: messages with tools, as OpenAI's protocol has them.

    tools    system        user                assistant   tool     assistant   user      assistant
    tools  | instruction | first observation | call      | result | no call   | answer  | ...

A turn of role `tools` comes first; its text is the JSON list of their definitions. A chat template
is given that list as `tools`, and so is a server. The result of a call is a turn of role `tool`;
the observation after a reply without a readable call is a user turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.episodes.native_calls import NativeCall, Tool, definitions, read_call
from agentr_core.episodes.opening import instruction_of, with_system
from agentr_core.episodes.transcript import Turns
from agentr_core.errors import ConfigError
from agentr_core.protocols.environment import Environment
from agentr_core.types import Message, Step


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
