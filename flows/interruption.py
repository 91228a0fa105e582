"""End a run in this process in an orderly way on Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from agentr_core.system import start_in_thread

T = TypeVar("T")

_REPEATED_SIGNAL_SECONDS = 3.0
"""A signal within so many seconds of the first is taken for a repetition of it, and ignored."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, which SIGINT and SIGTERM cancel, and return its result.

    The coroutine runs in a thread of its own, while the main thread, the caller's, handles signals:
    in the main thread, asyncio and Prefect would raise an exception wherever the program happens to
    be, and a second signal would break the cleanup that the first began. `timeout` and service
    managers send two at once, and people press Ctrl-C twice. A further signal after three seconds
    ends the process at once, as `kill -9` does.

    Raises `KeyboardInterrupt` if the coroutine was cancelled.
    """
    cancellation: Future[Callable[[], object]] = Future()

    async def run_main() -> T:
        task = asyncio.current_task()
        assert task is not None
        cancellation.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await main

    with _handle_signals(cancellation):
        try:
            return start_in_thread(lambda: asyncio.run(run_main()), name="run").result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


@contextmanager
def _handle_signals(cancellation: Future[Callable[[], object]]) -> Iterator[None]:
    """Within the block, make the first signal call the result of `cancellation`, as soon as it has
    one, and a signal more than three seconds later end the process at once.
    """
    first_signal_at: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_signal_at
        if first_signal_at is None:
            first_signal_at = time.monotonic()
            cancellation.add_done_callback(_cancel)
        elif time.monotonic() - first_signal_at > _REPEATED_SIGNAL_SECONDS:
            os.write(2, b"interrupted at once\n")
            os._exit(130)

    # A shell starts background jobs with SIGINT ignored, and they should go on ignoring it.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_handlers = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        # After an interruption the handler stays: the process is about to exit, and a second signal
        # could still break its cleanup.
        if first_signal_at is None:
            for number, handler in earlier_handlers.items():
                signal.signal(number, handler)


def _cancel(cancellation: Future[Callable[[], object]]) -> None:
    # The loop is closed if the task has just ended by itself.
    with suppress(RuntimeError):
        cancellation.result()()
