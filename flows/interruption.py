"""Ctrl-C and SIGTERM: how they end a run of this process in order."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_ONE_WISH_S = 3.0
"""Signals within so many seconds of the first are repetitions of it."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that SIGINT and SIGTERM cancel.

    It has a thread of its own, while this one, the main thread, minds signals: in the main thread,
    asyncio and Prefect raise an exception wherever the program happens to be, and a second signal
    would break the cleanup that the first began. `timeout` and service managers send two at once,
    and people press Ctrl-C twice. A further signal after three seconds ends the process at once,
    as `kill -9` does.

    Raises `KeyboardInterrupt` where a signal ended it.
    """
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    outcome: Future[T] = Future()

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await main

    def work() -> None:
        try:
            outcome.set_result(asyncio.run(noted()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="run")
    with _minding(begun):
        thread.start()
        thread.join()
    try:
        return outcome.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def _minding(begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]) -> Iterator[None]:
    """Have the first signal cancel a task, once it has begun, and a much later one end the
    process.
    """
    first: float | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            begun.add_done_callback(_cancel)
        elif time.monotonic() - first > _ONE_WISH_S:
            os.write(2, b"interrupted at once\n")
            os._exit(130)

    # A shell starts what runs in its background with interrupts ignored.
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        # An interrupted process has its end before it, in which a second signal does no less harm.
        if first is None:
            for number, handler in earlier.items():
                signal.signal(number, handler)


def _cancel(begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]) -> None:
    loop, task = begun.result()
    # The loop is closed where the task has just ended by itself.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(task.cancel)
