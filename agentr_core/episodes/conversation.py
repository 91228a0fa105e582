"""Windows over a conversation of alternating turns.

A history that outgrows the context may be read through a window, as the authors do: the oldest
exchanges, each an observation and the reply to it, are left out.

    instruction, "Ok.", first observation, first reply | turn        | turn        | observation
    always kept                                          dropped = 1   dropped = 2   always kept

A turn that was grown by continuation is always read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from agentr_core.episodes.transcript import opening_length
from agentr_core.types import Message, Step

Fits = Callable[[tuple[Message, ...]], bool]
"""Returns whether a prompt leaves room for a whole reply."""
TokensOf = Callable[[tuple[Message, ...]], int]
"""Returns the number of tokens of a prompt."""


def windowed(messages: tuple[Message, ...], dropped: int) -> tuple[Message, ...]:
    """Return a conversation without its `dropped` oldest exchanges, of which a prompt has at most
    `droppable`.
    """
    head = opening_length(messages) + 1
    return messages[:head] + messages[head + 2 * dropped :]


def droppable(messages: tuple[Message, ...]) -> int:
    """Return how many exchanges of a prompt may be left out: all but its last observation; none if
    a turn was grown by continuation.
    """
    return 0 if is_grown(messages) else max(0, (len(messages) - opening_length(messages) - 2) // 2)


def fewest_dropped(messages: tuple[Message, ...], fits: Fits, *, least: int = 0) -> int:
    """Return how many exchanges of a prompt to leave out, `least` or more: as few as make it fit.

    The number is `droppable` if not even that is enough.
    """
    most = droppable(messages)
    dropped = min(least, most)
    while dropped < most and not fits(windowed(messages, dropped)):
        dropped += 1
    return dropped


def of_another_run(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps that another run recorded, for use in this one.

    Token ids of an unknown tokenizer, such as those that earlier versions stored, are left out:
    only their own run knows whose they are.
    """
    return tuple(step if step.tokenizer else replace(step, token_ids=(), logprobs=None) for step in steps)


def is_grown(messages: Sequence[Message]) -> bool:
    """Return whether any turn of a conversation was grown by continuation."""
    return any(message.spans for message in messages)
