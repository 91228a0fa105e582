"""Concurrent requests: all of their results, or the first fault."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; the first fault cancels the others, and is raised when they have
    ended.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
