"""The lock that lets only one process at a time work on a run, and the status that a run ends
with.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from agentr_core.errors import RunBusy, StoreError
from agentr_core.recipes.recipe import Recipe, replace
from agentr_core.runtime.start import finish_run, total_iterations
from agentr_core.store.connection import LOCK_FOLDER
from agentr_core.store.queries.runs import find_runs
from tasks.wiring import RunRef, quiet_context, run_reference
from tasks.workspaces import open_store

_HELD: ContextVar[frozenset[str]] = ContextVar("held", default=frozenset())
"""The lock files that an enclosing block holds."""


@contextmanager
def run_locked(run: RunRef) -> Iterator[None]:
    """Hold the lock of a run for the length of the block, and keep the store of its workspace open;
    the lock is released when the process ends, however it ends.

    A nested block for the same run shares the lock, as the stages of a flow do. Other runs of the
    workspace are not locked. Raises `RunBusy` at once if the lock is held elsewhere, in this
    process or another, and `StoreError` if the lock file cannot be made.
    """
    file = Path(run.workspace) / LOCK_FOLDER / run.run_id
    name = str(file.absolute())
    if name in _HELD.get():
        yield
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("a+")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"{file} cannot be made ({reason}); make its folder writable for you, or name another workspace"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(
                f"run {run.run_id} is already under way in {run.workspace}, in another process; wait for it or stop it"
            ) from None
        token = _HELD.set(_HELD.get() | {name})
        try:
            # A stage makes many small queries, and opening the file takes longer than most of them.
            with open_store(Path(run.workspace), patient=True).keep_open():
                yield
        finally:
            _HELD.reset(token)


@contextmanager
def all_runs_locked(workspace: Path) -> Iterator[None]:
    """Hold the locks of all runs of a workspace for the length of the block. Raises `RunBusy` at
    once if another process is working on one of them.
    """
    with ExitStack() as stack:
        for run_id in find_runs(open_store(workspace, must_exist=True), ""):
            stack.enter_context(run_locked(RunRef(workspace=str(workspace), run_id=run_id)))
        yield


def with_more_iterations(recipe: Recipe, more: int) -> Recipe:
    """Return a recipe with `more` iterations added to those that its run has finished. If the run
    was interrupted or failed, keep the number that it was started with, whatever `more` is.
    """
    run = run_reference(recipe)
    goal = total_iterations(open_store(Path(run.workspace)), run.run_id, more)
    return replace(recipe, iterations=goal)


@asynccontextmanager
async def status_recorded(run: RunRef, *, evaluates: bool = False) -> AsyncIterator[None]:
    """Record the outcome of the block as the status of the run; an interrupted run stays "running"
    in the store.

    With `evaluates`, the block only evaluates a model: a run that was started to train keeps its
    status.
    """
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except Exception:
        if not evaluates:
            await _end(run, "failed")
        raise
    await _end(run, "finished", evaluates=evaluates)


async def _end(run: RunRef, status: Literal["finished", "failed"], *, evaluates: bool = False) -> None:
    ctx = quiet_context(run)
    await finish_run(ctx, status, evaluates=evaluates)
    # Fold the log into the database file: people copy that one file and take it for the store.
    ctx.store.checkpoint()
