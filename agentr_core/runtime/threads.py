"""Long work in a thread that ends soon after nobody waits for it any more, as after Ctrl-C."""

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
    """Return what a function returns in a thread, where it calls `check_wanted` every now and then.

    A cancellation is passed on once the thread has let go: what the caller closes then is in
    nobody's hands.
    """
    unwanted = threading.Event()
    token = _unwanted.set(unwanted)
    try:
        # A task copies the context as it is made; the thread gets that copy.
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
