"""Stages as the plan of an iteration has them."""

from __future__ import annotations

from typing import Any

from agentr_core.runtime.place import Workplace


async def perform(name: str, place: Workplace, iteration: int) -> Any:
    """Do the stage of a name of an iteration's plan."""
    return await place.plan(iteration).stage(name).work(place, iteration)
