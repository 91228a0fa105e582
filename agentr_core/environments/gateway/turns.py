"""The conversation of an outside agent, as it sends it: as messages, and as the text of an
observation.

Each call of an agent has its whole history. If the history continues the previous call, the
observation is the added turns; if not, for example after the agent summarised its history or began
another thread, a new conversation begins, and the observation has all of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentr_core.episodes.native_calls import NativeCall, read_call
from agentr_core.episodes.transcript import reply_turn
from agentr_core.errors import IllTypedAnswer
from agentr_core.protocols.environment import Environment
from agentr_core.types import Message, Role, Sampling, Step

_LIST: Final = '[{"role": '
_ANEW: Final = {"role": "anew"}


@dataclass(frozen=True, slots=True)
class OutsideTurns:
    """The agent's own messages and the policy's replies, exactly as they were read.

    An episode may have several conversations, one after the other. `prompt` and `sample` return the
    last one; `begins` says where each begins, and training sees all of them.
    """

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation that the next reply answers."""
        return self._turns(first_observation, steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the last conversation up to its last reply."""
        if not steps:
            return self._turns(first_observation, steps, train)
        before = self._turns(first_observation, steps[:-1], train[:-1])
        return (*before, reply_turn(steps[-1], train[-1]))

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings as they are: the recipe says how replies are drawn."""
        return sampling

    def begins(self, steps: Sequence[Step]) -> tuple[int, ...]:
        """Return the positions of the steps at which conversations begin, 0 first."""
        later = (position + 1 for position, step in enumerate(steps[:-1]) if _is_anew(step.observation))
        return (0, *later)

    def _turns(self, first_observation: str, steps: Sequence[Step], train: Sequence[bool]) -> tuple[Message, ...]:
        turns = list(read_turns(first_observation))
        for step, flag in zip(steps, train, strict=True):
            if _is_anew(step.observation):
                turns.clear()
            else:
                turns.append(reply_turn(step, flag))
            turns += read_turns(step.observation)
        return tuple(turns)


def written(turns: Sequence[Message], *, anew: bool = False) -> str:
    """Return turns as the text of an observation: a single turn of the user as it is, anything else
    as JSON.

    `anew` says that they are a whole conversation, not an addition to the one before.
    """
    plain = len(turns) == 1 and turns[0].role == "user" and turns[0].text and not turns[0].text.startswith(_LIST)
    if plain and not anew:
        return turns[0].text
    told = [{"role": turn.role, "content": turn.text} for turn in turns]
    return json.dumps([*([_ANEW] if anew else []), *told], ensure_ascii=False)


def read_turns(text: str) -> tuple[Message, ...]:
    """Return the turns in the text of an observation; none in an empty one."""
    if not text.startswith(_LIST):
        return (Message(role="user", text=text),) if text else ()
    told: list[dict[str, Any]] = [turn for turn in json.loads(text) if turn != _ANEW]
    return tuple(Message(role=turn["role"], text=turn["content"]) for turn in told)


def observed(history: Sequence[Message], now: Sequence[Message]) -> str:
    """Return what an agent's call adds to the conversation so far, as the text of an observation.

    Replies count as the same if they differ only in white space at their ends and in the spelling
    of a tool call, which OpenAI's protocol splits into parts.
    """
    return written(now[len(history) :]) if continues(history, now) else written(now, anew=True)


def continues(history: Sequence[Message], now: Sequence[Message]) -> bool:
    """Return whether an agent's call goes on from a conversation."""
    return len(now) > len(history) and all(map(_same, history, now))


def turn_of(told: Any) -> Message:
    """Return the message for a turn that the gateway sent. Raises `IllTypedAnswer` for anything
    else.
    """
    if not isinstance(told, dict) or not isinstance(told.get("text"), str):
        raise IllTypedAnswer(f"the gateway told {str(told)[:80]} in place of a turn; start the one of this version")
    role: Role = told["role"]
    return Message(role=role, text=told["text"])


def _same(ours: Message, theirs: Message) -> bool:
    return ours.role == theirs.role and (ours.text == theirs.text or _normal(ours) == _normal(theirs))


def _normal(turn: Message) -> Any:
    if turn.role != "assistant":
        return turn.text
    call = read_call(turn.text)
    return (call.name, call.arguments, call.beside) if isinstance(call, NativeCall) else turn.text.strip()


def _is_anew(observation: str) -> bool:
    return observation.startswith(_LIST + json.dumps(_ANEW["role"]))
