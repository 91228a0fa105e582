"""Functions in threads: one of its own for a function, long work that ends soon after its caller is
cancelled, as by Ctrl-C, and a thread for coroutines.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_unwanted: ContextVar[threading.Event | None] = ContextVar("agentr_unwanted", default=None)


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


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that calls `check_wanted` every now and then in a thread; return its result.

    A cancellation is passed on once the thread has ended: what the caller closes then is no longer
    in use.
    """
    unwanted = threading.Event()
    token = _unwanted.set(unwanted)
    try:
        # A task copies the context when it is made; the thread gets that copy.
        work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    finally:
        _unwanted.reset(token)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        unwanted.set()
        await asyncio.wait({work})
        raise


def check_wanted() -> None:
    """Raise `CancelledError` in a thread of `in_thread` whose caller was cancelled; do nothing
    anywhere else.
    """
    unwanted = _unwanted.get()
    if unwanted is not None and unwanted.is_set():
        raise asyncio.CancelledError


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
