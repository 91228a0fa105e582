"""The flywheel of one question, from its fresh trajectories through its rounds.

The result depends on the children alone, so an interrupted family grows on from those already made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from agentr_core.methods.et_agent.flywheel.family import Member, PlannedChild, begun, parents, planned_children
from agentr_core.recipes.et_agent import FlywheelConfig

Make = Callable[[PlannedChild], Awaitable[Member | None]]
"""Returns the planned child, made now or earlier; None where its operator makes none."""


class Grown(NamedTuple):
    """A finished family: its members in order, the number of its rounds, and what ended it."""

    members: tuple[Member, ...]
    rounds: int
    ended_by: str


async def grow(config: FlywheelConfig, make: Make, answered: Callable[[int], int]) -> Grown:
    """Return the family of a question after its rounds.

    Args:
        answered: the number of tokens that models wrote for the family before a round. Answers for
            later rounds, from an earlier try, do not count, so that the family ends where it would
            have without the interruption.

    Raises what `make` raises, once the other children of the round are made.
    """
    members = await _made(begun(config), make)
    used: set[str] = set()
    for round_ in range(1, config.rounds + 1):
        written = sum(member.tokens for member in members) + answered(round_)
        if config.most_tokens and written >= config.most_tokens:
            return Grown(tuple(members), round_ - 1, "tokens")
        varied = parents(members, used, config)
        tried = planned_children(varied, round_, config, room=config.most_members - len(members))
        if not tried and len(members) >= config.most_members:
            return Grown(tuple(members), round_ - 1, "members")
        used |= {parent.name for parent in varied}
        children = await _made(tried, make)
        if not children:
            return Grown(tuple(members), round_, "no-child")
        members += children
    return Grown(tuple(members), config.rounds, "rounds")


async def _made(tried: Sequence[PlannedChild], make: Make) -> list[Member]:
    """Return the children in the order of their plans. A fault does not end the others: what can be
    made is made and kept.
    """
    found = await asyncio.gather(*map(make, tried), return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if isinstance(one, Member)]
