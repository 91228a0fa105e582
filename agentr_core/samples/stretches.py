"""Samples of paths that were read through a window: one for each stretch between two drops.

    reply drawn with   0 0 0 0 | 1 1 | 2 2 2     exchanges left out
    stretch            first     second third

A stretch is a conversation as it was read at that point. Only its own replies carry loss; earlier
ones that are still in the window are read, but not trained again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from agentr_core.episodes.conversation import Fits, fewest_dropped, is_grown, windowed
from agentr_core.episodes.transcript import opening_length
from agentr_core.types import Message, Rejection, Sample

Way = Literal["stretches", "reject"]


def drops(messages: tuple[Message, ...], fits: Fits) -> tuple[int, ...]:
    """Return for each reply of a conversation how many exchanges a window leaves out of its prompt;
    empty for a turn that was grown by continuation, which is read whole.
    """
    if is_grown(messages):
        return ()
    found: list[int] = []
    for reply in range(opening_length(messages), len(messages), 2):
        found.append(fewest_dropped(messages[:reply], fits, least=found[-1] if found else 0))
    return tuple(found)


def split(
    sample: Sample, dropped: Sequence[int], way: Way, *, stage: str, subject: str
) -> tuple[Sample, ...] | Rejection:
    """Return the sample of a whole path as samples of its stretches, or why it gives none.

    A path that was read whole is returned as it is. Stretches without a trained reply are left out.

    Args:
        dropped: for each reply, how many exchanges were left out of its prompt; never fewer than
        for the one before.
        stage, subject: those of the rejection.
    """
    if not any(dropped):
        return (sample,)
    if way == "reject":
        first = next(position for position, number in enumerate(dropped) if number)
        detail = f"from step {first} on it was read without its oldest turns; data.windowed is reject"
        return Rejection(stage=stage, subject=subject, reason="windowed", detail=detail)
    borders = [position for position, number in enumerate(dropped) if position == 0 or dropped[position - 1] != number]
    made: list[Sample] = []
    for start, end in zip(borders, [*borders[1:], len(dropped)], strict=True):
        messages = _stretch(sample.messages, start, end, dropped[start])
        if any(message.train for message in messages):
            made.append(_numbered(sample, messages, number=len(made), dropped=dropped[start]))
    return tuple(made)


def _stretch(messages: tuple[Message, ...], start: int, end: int, dropped: int) -> tuple[Message, ...]:
    """Return what was read and said from reply `start` up to, not including, reply `end`; it ends
    with a reply.
    """
    opening = opening_length(messages)
    first = opening + 2 * start
    before = tuple(replace(message, train=False) for message in messages[:first])
    return windowed(before + messages[first : opening + 2 * end - 1], dropped)


def _numbered(sample: Sample, messages: tuple[Message, ...], *, number: int, dropped: int) -> Sample:
    extra = {**sample.provenance.extra, "stretch": number, "dropped": dropped}
    return replace(sample, messages=messages, provenance=replace(sample.provenance, extra=extra))
