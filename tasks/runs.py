"""How a run ends: finished, or failed with a word on how to go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentr_core.stages.start import finish
from tasks.wiring import RunRef, quiet_workplace


@asynccontextmanager
async def kept(run: RunRef) -> AsyncIterator[None]:
    """Write the outcome of the block as the status of the run; an interrupted run stays "running"."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except Exception:
        await finish(quiet_workplace(run), "failed")
        raise
    await finish(quiet_workplace(run), "finished")
