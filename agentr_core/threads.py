"""A function in a thread of its own, and a thread for coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def started(function: Callable[[], T], *, name: str, daemon: bool = False) -> Future[T]:
    """Return the coming result of a function, which runs in a new thread with a copy of the
    caller's context; the end of the process waits for it unless it is a daemon.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(function))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return result


class LoopThread:
    """An event loop in its own thread, to which other threads give coroutines to run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Raises what the coroutine raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that nobody waits for."""
        self._loop.call_soon_threadsafe(self._loop.create_task, coroutine)

    def close(self) -> None:
        """End the thread. Calling it twice is harmless."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
