"""Environments that many episodes share, one episode at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentr_core.episodes.units import phase
from agentr_core.protocols.abilities import Relaying
from agentr_core.protocols.environment import Environment
from agentr_core.texts import cause
from agentr_core.types import Instance


class SharedEnvironments:
    """A pool of environments to lend, each made when all others of its world are lent out. One that
    met an exception is closed and not lent again.

    `make` makes a new environment of a world, given the name that the world's instances use.
    """

    def __init__(self, make: Callable[[str], Environment]) -> None:
        self._make = make
        self._idle: dict[str, list[Environment]] = {}

    @asynccontextmanager
    async def lend(self, instance: Instance) -> AsyncIterator[Environment]:
        """Lend an environment of an instance's world for the block."""
        idle = self._idle.setdefault(instance.environment, [])
        with phase("environment start"):
            env = idle.pop() if idle else await asyncio.to_thread(self._make, instance.environment)
        try:
            yield env
        except BaseException as error:
            if isinstance(env, Relaying):
                env.release(f"its run had a fault: {cause(error)}" if isinstance(error, Exception) else "its run ended")
            env.close()
            raise
        if isinstance(env, Relaying):
            await asyncio.to_thread(env.release)
        idle.append(env)

    def close(self) -> None:
        """Close the environments that are not in use. Calling it twice is harmless."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
