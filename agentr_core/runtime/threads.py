"""Long work in a thread, which ends soon after its caller is cancelled, as by Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_unwanted: ContextVar[threading.Event | None] = ContextVar("agentr_unwanted", default=None)


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
