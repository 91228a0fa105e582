"""A keeper as its user sees it: a process that answers one question at a time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentr_core.errors import SandboxError
from agentr_core.lifetime import Scratch, source_folder
from agentr_core.tools.python.bubblewrap import wrapped
from agentr_core.tools.python.levels import Level
from agentr_core.tools.python.limits import Limits

_START_S = 120.0
_GRACE_S = 10.0
"""Seconds to wait beyond the time limit of a call, and for an orderly exit."""
_LONGEST_LINE = 1 << 26
_PROGRAM = "import sys; sys.path.insert(0, {source!r}); from agentr_core.tools.python.keeper import main; main()"
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PATH": "/usr/bin:/bin",
    # Gives sets of strings the same order each time.
    "PYTHONHASHSEED": "0",
    # A process that forks must have one thread, and each malloc arena reserves address space.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""All environment variables that a keeper and the code in it see."""


class KeeperLost(Exception):
    """The fault that a keeper has ended or does not answer."""


class KeeperProcess:
    """A keeper and its folder."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Scratch) -> None:
        """Take over a running process and its folder; `start` creates them."""
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, level: Level, limits: Limits, packages: Sequence[str]) -> KeeperProcess:
        """Return a warm keeper. Raises `SandboxError` if it refuses to work."""
        folder = Scratch("code")
        program = _PROGRAM.format(source=source_folder())
        command = [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", program]
        try:
            process = await asyncio.create_subprocess_exec(
                *(wrapped(command, folder.path) if level is Level.BUBBLEWRAP else command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=folder.path,
                env=_ENVIRONMENT | {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        except OSError as error:
            folder.close()
            raise SandboxError(f"level {level} does not hold: {error}") from None
        keeper = cls(process, folder)
        settings = {"level": level, "limits": asdict(limits), "packages": list(packages), "folder": folder.path}
        try:
            answer = await keeper.ask(settings, _START_S)
        except KeeperLost:
            await keeper.stop()
            raise SandboxError(f"level {level} does not hold: its interpreter does not start") from None
        except BaseException:
            await keeper.stop()
            raise
        if refusal := answer.get("refused"):
            await keeper.stop()
            raise SandboxError(f"the Python tool at level {level} does not start: {refusal}")
        return keeper

    async def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to one question. Raises `KeeperLost` if no answer comes within
        `seconds` and some grace.
        """
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        try:
            sink.write(json.dumps(question).encode() + b"\n")
            await sink.drain()
            line = await asyncio.wait_for(source.readline(), seconds + _GRACE_S)
            # The line is truncated or empty if the keeper ended.
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            raise KeeperLost(str(error)) from error
        return answer

    async def stop(self) -> None:
        """End the keeper and everything that runs in it."""
        sink = self._process.stdin
        assert sink is not None
        # The keeper then kills its current call; if it were killed, it could not.
        sink.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._folder.close()
