"""Environments that many episodes share, one episode at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentr_core.episodes.units import phase
from agentr_core.protocols import Environment


class SharedEnvironments:
    """Environments to lend, made when all others are out. One that met an exception is closed and
    not lent again.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._idle: list[Environment] = []

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Environment]:
        """Lend an environment for the length of the block."""
        with phase("environment start"):
            env = self._idle.pop() if self._idle else await asyncio.to_thread(self._make)
        try:
            yield env
        except BaseException:
            env.close()
            raise
        self._idle.append(env)

    def close(self) -> None:
        """Close the environments that are not out. Calling it twice is harmless."""
        while self._idle:
            self._idle.pop().close()
