"""A function in a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
