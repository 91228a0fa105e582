"""How the steps of an episode become a conversation: what the model reads before its next reply,
and what training sees of it. It is a property of the world.

Search, rollouts, splices and preferences all build their conversations here, so a model is trained
on exactly what it reads while it acts. There are two transcripts here, and a third one in
`native_turns`, of messages with tools:

    alternating turns   instruction | "Ok." | first observation | reply | observation | reply ...
                        user          asst.   user                asst.   user          assistant

    continuation        instruction | first observation | reply, observation, reply, ... reply
                        system        user                one assistant turn of as many spans

Examples that are turns stand before the first observation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentr_core.episodes.opening import example_turns, instruction_of, system_turns, with_system
from agentr_core.errors import ConfigError
from agentr_core.protocols.environment import Dividing, Environment, Transcript
from agentr_core.types import Message, Request, Sampling, Span, Step, Trajectory, grown_turn

OPENING = 3
"""Turns before the first reply where turns alternate, unless a system turn comes before them, or
examples between.
"""


def opening_length(messages: Sequence[Message]) -> int:
    """Return how many turns come before the first reply of a conversation whose turns alternate."""
    examples = sum(message.example for message in messages)
    return OPENING + examples + bool(messages and messages[0].role == "system")


class Turns(ABC):
    """Replies and what answers them, in turns after an opening."""

    @abstractmethod
    def opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        """Return the turns before the first reply."""

    @abstractmethod
    def result(self, step: Step) -> Message:
        """Return the turn that answers the reply of a step."""

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation up to the last observation; it never ends with a reply."""
        return self._turns(env, first_observation, steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation up to the last reply. The last observation is left out: without a
        reply it would lengthen a sample and teach nothing.
        """
        turns = self._turns(env, first_observation, steps, train)
        return turns[:-1] if steps else turns

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings as they are: a reply ends with its turn."""
        return sampling

    def _turns(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        later = (
            turn
            for step, flag in zip(steps, train, strict=True)
            for turn in (reply_turn(step, flag), self.result(step))
        )
        return (*self.opening(env, first_observation), *later)


@dataclass(frozen=True, slots=True)
class AlternatingTurns(Turns):
    """Reply and observation in turns, after instruction, acknowledgement and first observation.

    There is no system turn unless the recipe has one. Source: Agent-R (arXiv 2501.11425), the
    set-up of its search and its evaluation.
    """

    def opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        """Return the turns before the first reply."""
        return (
            *system_turns(env),
            Message(role="user", text=instruction_of(env)),
            Message(role="assistant", text=env.acknowledgement),
            *example_turns(env),
            Message(role="user", text=first_observation),
        )

    def result(self, step: Step) -> Message:
        """Return the observation as a user's turn."""
        return Message(role="user", text=step.observation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One assistant turn that grows: the model writes up to a stop string, which is kept; the
    observation is appended to the same turn unchanged, tags included; then the model goes on.

    The instruction is the system turn, and the first observation the user's. Each step gives two
    spans: its reply, and its observation, which may be empty and never carries loss.

    Args:
        stop: the texts that end a reply, at least one, such as `</search>` and `</answer>`.
    """

    stop: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not self.stop or not all(self.stop):
            raise ConfigError(f"a continuation needs texts that end a reply, not {self.stop!r}; name the closing tags")

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation up to the last observation: from the second reply on it ends
        inside the assistant turn.
        """
        spans = self._spans(steps, [False] * len(steps))
        return (*self._opening(env, first_observation), *([grown_turn(spans)] if spans else []))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation up to the last reply. A reply that is nothing but its end carries
        loss only as the last one: elsewhere its end is not read either.
        """
        last = len(steps) - 1
        flags = [flag and (position == last or _speaks(steps[position])) for position, flag in enumerate(train)]
        spans = self._spans(steps, flags)[:-1]
        return (*self._opening(env, first_observation), *([grown_turn(spans)] if spans else []))

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings with this transcript's stop strings before their own, all kept in the
        replies.
        """
        return replace(sampling, stop=tuple(dict.fromkeys((*self.stop, *sampling.stop))), include_stop=True)

    def _opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        instruction = with_system(env, instruction_of(env))
        problem = Message(role="user", text=first_observation)
        return Message(role="system", text=instruction), *example_turns(env), problem

    def _spans(self, steps: Sequence[Step], train: Sequence[bool]) -> list[Span]:
        return [
            span
            for step, flag in zip(steps, train, strict=True)
            for span in (_reply(step, flag), Span(text=step.observation))
        ]


_ALTERNATING = AlternatingTurns()


def transcript_of(env: Any) -> Transcript:
    """Return the transcript of a world: its attribute `transcript`, or else alternating turns."""
    found: Transcript = getattr(env, "transcript", _ALTERNATING)
    return found


def transcript(
    env: Environment, first_observation: str, steps: Sequence[Step], *, train: Sequence[bool]
) -> tuple[Message, ...]:
    """Return the conversation of an episode up to its last reply, as its world's transcript builds
    it. A reply carries loss if its flag in `train` is set.
    """
    return transcript_of(env).sample(env, first_observation, steps, train)


def whole_episode(env: Environment, trajectory: Trajectory) -> tuple[Message, ...]:
    """Return the conversation of an episode with all its replies trained."""
    steps = trajectory.steps
    return transcript(env, trajectory.first_observation, steps, train=[True] * len(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """Where the replies to a world end whose recipe ends them at their first action: at a match of
    a pattern, or at one of some texts, which a model writes that goes on with what it invents.
    """

    pattern: str
    stop: tuple[str, ...]


def _up_to_action(env: Any, sampling: Sampling) -> Sampling:
    """Return the settings for a reply to an environment, which may end at its first action."""
    until: Until | None = getattr(env, "until", None)
    if until is None:
        return sampling
    return replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *until.stop))), until=until.pattern)


class Part(NamedTuple):
    """The steps from `start` up to, not including, `end` of an episode, and their conversation."""

    start: int
    end: int
    messages: tuple[Message, ...]


def conversations(env: Environment, trajectory: Trajectory) -> tuple[Part, ...]:
    """Return the conversations of an episode, one after the other, with all their replies trained:
    one, unless the world's transcript divides it.
    """
    kind, steps = transcript_of(env), trajectory.steps
    begins = kind.begins(steps) if isinstance(kind, Dividing) else (0,)
    return tuple(
        Part(start, end, kind.sample(env, trajectory.first_observation, steps[:end], [True] * end))
        for start, end in zip(begins, (*begins[1:], len(steps)), strict=True)
    )


def ask_next(
    env: Environment,
    first_observation: str,
    steps: Sequence[Step],
    sampling: Sampling,
    *,
    seed: int,
    session: str,
    n: int = 1,
) -> Request:
    """Return the request for the reply that follows the given steps, as the world's transcript
    builds and stops it.
    """
    kind = transcript_of(env)
    return Request(
        messages=kind.prompt(env, first_observation, steps),
        sampling=_up_to_action(env, kind.sampling(sampling)),
        seed=seed,
        n=n,
        session=session,
    )


def _reply(step: Step, train: bool) -> Span:
    """Return the reply of a step with the token ids it was sampled as, so that it is read again and
    trained on as the same tokens, and why it ended, so that a cut one is not trained to end there.
    """
    return Span(
        text=step.reply,
        train=train,
        token_ids=step.token_ids or None,
        finish_reason=step.finish_reason,
        tokenizer=step.tokenizer,
    )


def _speaks(step: Step) -> bool:
    return bool(step.reply) or len(step.token_ids) > 1


def reply_turn(step: Step, train: bool) -> Message:
    """Return the reply of a step as a turn, with the tokens that it was sampled as."""
    reply = _reply(step, train)
    return Message(
        role="assistant",
        text=reply.text,
        train=reply.train,
        token_ids=reply.token_ids,
        finish_reason=reply.finish_reason,
        tokenizer=reply.tokenizer,
    )
