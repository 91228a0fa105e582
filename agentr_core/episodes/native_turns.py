"""The transcript of native tool calls: messages with tools, as OpenAI's protocol has them.

    tools    system        user                assistant   tool     assistant   user      assistant
    tools  | instruction | first observation | call      | result | no call   | answer  | ...

A turn of role `tools` comes first; its text is the JSON list of their definitions. A chat template
is given that list as `tools`, and so is a server. The result of a call is a turn of role `tool`;
the observation after a reply without a readable call is a user turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.episodes.native_calls import NativeCall, Tool, definitions, read_call
from agentr_core.episodes.opening import instruction_of, with_system
from agentr_core.episodes.transcript import reply_turn
from agentr_core.errors import ConfigError
from agentr_core.protocols import Environment
from agentr_core.types import Message, Sampling, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTurns:
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

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation up to the last result."""
        return self._turns(env, first_observation, steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation up to the last reply."""
        turns = self._turns(env, first_observation, steps, train)
        return turns[:-1] if steps else turns

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings as they are: a reply ends with its turn."""
        return sampling

    def _turns(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        opening = (
            Message(role="tools", text=definitions(self.tools)),
            Message(role="system", text=with_system(env, "\n\n".join(filter(None, (instruction_of(env), self.note))))),
            Message(role="user", text=first_observation),
        )
        later = (
            turn for step, flag in zip(steps, train, strict=True) for turn in (reply_turn(step, flag), _result(step))
        )
        return (*opening, *later)


def _result(step: Step) -> Message:
    called = isinstance(read_call(step.reply), NativeCall)
    return Message(role="tool" if called else "user", text=step.observation)
