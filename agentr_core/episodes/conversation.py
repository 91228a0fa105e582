"""The conversation of a state: what the model reads before its next reply, and what training sees
of it.

There is no system turn: instruction, acknowledgement, first observation, then reply and observation
in turns. Source: Agent-R (arXiv 2501.11425), the set-up of its search and its evaluation. Search,
rollouts and splicing all build their conversations here, so a model is trained on exactly what it
reads while it acts.

A history that outgrows the context may be read through a window, as the authors do: the oldest
exchanges, each an observation and the reply to it, are left out.

    instruction, "Ok.", first observation, first reply | turn        | turn        | observation
    always kept                                          dropped = 1   dropped = 2   always kept
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from agentr_core.protocols import Environment
from agentr_core.types import Message, Step

HEAD = 4
"""Turns that a window keeps at the beginning."""

Fits = Callable[[tuple[Message, ...]], bool]
"""Returns whether a prompt leaves room for a whole reply."""


def opening(env: Environment, first_observation: str) -> tuple[Message, ...]:
    """Return the three turns before the first reply; none of them carries loss."""
    return (
        Message(role="user", text=env.instruction),
        Message(role="assistant", text=env.acknowledgement),
        Message(role="user", text=first_observation),
    )


def turns(steps: Iterable[Step], *, train: bool = False) -> tuple[Message, ...]:
    """Return two turns for each step: the reply, which carries loss if `train`, and the
    observation, which never does.

    A reply keeps the token ids it was sampled as, so that it is read again and trained on as the
    same tokens, and why it ended, so that a cut one is not trained to end there.
    """
    return tuple(message for step in steps for message in _turn(step, train))


def conversation(env: Environment, first_observation: str, steps: Iterable[Step]) -> tuple[Message, ...]:
    """Return the prompt for the reply that follows the given steps; it ends with a user turn."""
    return opening(env, first_observation) + turns(steps)


def windowed(messages: tuple[Message, ...], dropped: int) -> tuple[Message, ...]:
    """Return a conversation without its `dropped` oldest exchanges, of which a prompt has at most
    `droppable`.
    """
    return messages[:HEAD] + messages[HEAD + 2 * dropped :]


def droppable(messages: tuple[Message, ...]) -> int:
    """Return how many exchanges of a prompt may be left out: all but its last observation."""
    return max(0, (len(messages) - HEAD - 1) // 2)


def fewest_dropped(messages: tuple[Message, ...], fits: Fits, *, least: int = 0) -> int:
    """Return how many exchanges of a prompt to leave out, `least` or more: as few as make it fit.

    It is `droppable` where not even that is enough.
    """
    most = droppable(messages)
    dropped = min(least, most)
    while dropped < most and not fits(windowed(messages, dropped)):
        dropped += 1
    return dropped


def of_another_run(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps that another run recorded, for use in this one.

    Token ids of an unknown tokenizer, such as those that earlier versions stored, are left out:
    only in their own run is it known whose they are.
    """
    return tuple(step if step.tokenizer else replace(step, token_ids=(), logprobs=None) for step in steps)


def _turn(step: Step, train: bool) -> tuple[Message, Message]:
    reply = Message(
        role="assistant",
        text=step.reply,
        train=train,
        token_ids=step.token_ids or None,
        finish_reason=step.finish_reason,
        tokenizer=step.tokenizer,
    )
    return reply, Message(role="user", text=step.observation)
