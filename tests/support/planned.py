"""Stages as the plan of an iteration has them."""

from __future__ import annotations

from typing import Any

from agentr_core.runtime.context import RunContext


async def perform(name: str, ctx: RunContext, iteration: int) -> Any:
    """Do the stage of a name of an iteration's plan."""
    return await ctx.plan(iteration).stage(name).work(ctx, iteration)
