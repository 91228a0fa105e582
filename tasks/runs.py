"""One process at a time works on a run; and how it ends: finished, or failed with a word on how to go on."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

from agentr_core.errors import RunBusy, StoreError
from agentr_core.stages.start import finish
from tasks.wiring import RunRef, quiet_workplace


@contextmanager
def alone(run: RunRef) -> Iterator[None]:
    """Hold the lock of a run for the length of the block; it is free again when the process ends, however it ends.

    Other runs of the workspace are not kept out. Raises `RunBusy` at once when another process holds the lock.
    """
    file = Path(run.workspace) / "locks" / run.run_id
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("a+")
    except OSError as error:
        raise StoreError(f"{file} cannot be made ({error.strerror}); name another workspace") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(
                f"run {run.run_id} is already under way in {run.workspace}, in another process; wait for it or stop it"
            ) from None
        yield


@asynccontextmanager
async def kept(run: RunRef) -> AsyncIterator[None]:
    """Write the outcome of the block as the status of the run; an interrupted run stays "running"."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except Exception:
        await _end(run, "failed")
        raise
    await _end(run, "finished")


async def _end(run: RunRef, status: Literal["finished", "failed"]) -> None:
    place = quiet_workplace(run)
    await finish(place, status)
    # People copy the one file when a run has ended, and take it for the store.
    place.store.checkpoint()
