"""Replies of a model, drawn within the room of its context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from agentr_core.episodes.conversation import Fits, droppable, fewest_dropped, windowed
from agentr_core.episodes.steps import EpisodeTimer, Outcome
from agentr_core.episodes.units import phase
from agentr_core.errors import ModelFault, PromptTooLong
from agentr_core.types import Generation, Request

Ask = Callable[[Request], Awaitable[list[Generation]]]
"""Returns `request.n` replies. Raises `PromptTooLong` when this request, and not another of its
batch, is too long.
"""


async def draw_within(
    sample: Ask, request: Request, timer: EpisodeTimer, fits: Fits | None, *, least: int = 0
) -> tuple[list[Generation], int]:
    """Return the replies to a request, and how many of its oldest exchanges were left out to make
    it fit.

    Args:
        fits: None leaves nothing out.
        least: how many were left out for the previous reply; the number never falls.

    Raises `PromptTooLong` when there is no room for a reply even so.
    """
    most = 0 if fits is None else droppable(request.messages)
    dropped = 0 if fits is None else fewest_dropped(request.messages, fits, least=least)
    while True:
        try:
            shown = replace(request, messages=windowed(request.messages, dropped)) if dropped else request
            return await draw(sample, shown, timer), dropped
        except PromptTooLong:
            # A server may count more tokens than we do.
            if dropped >= most:
                raise
            dropped += 1


def read_through(outcome: Outcome, dropped: int) -> Outcome:
    """Return the outcome of a reply that was drawn from a conversation without its `dropped` oldest
    exchanges.
    """
    return replace(outcome, step=replace(outcome.step, dropped=dropped)) if dropped else outcome


async def draw(sample: Ask, request: Request, timer: EpisodeTimer) -> list[Generation]:
    """Return the replies to a request. Raises `ModelFault` when their number is not the one asked
    for.
    """
    with phase("generate"), timer.sampling():
        generations = await sample(request)
        if len(generations) != request.n:
            raise ModelFault(f"session {request.session}: {request.n} replies were asked for, {len(generations)} came")
        return generations
