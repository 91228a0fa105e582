"""`PythonTool`, the interface for the rest of the program."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType

from agentr_core.errors import SandboxError
from agentr_core.tools.python.levels import CANDIDATES, STRICTEST, Level
from agentr_core.tools.python.limits import PACKAGES, Limits, Outcome, Status
from agentr_core.tools.python.process import KeeperLost, KeeperProcess
from agentr_core.tools.python.selftest import Finding, tried

_ATTEMPTS = 2


def named(level: Level) -> str:
    """Return how a recipe names a level."""
    return f"environment.options.sandbox={level}"


class PythonTool:
    """A pool of warm interpreters; each call runs in its own confined process.

        async with PythonTool(Limits(timeout_s=5)) as tool:
            outcome = await tool.run("import math\\nmath.comb(50, 6)")

    Nothing is kept from one call to the next. On entry the tool tests whether code can break out,
    and refuses to work if a barrier of its level does not hold.
    """

    level: Level
    """The level that holds; set on entry."""
    findings: tuple[Finding, ...]
    """The findings of the self-test; set on entry."""
    refused: tuple[str, ...]
    """The reasons why stricter levels do not hold; set on entry."""

    def __init__(
        self,
        limits: Limits | None = None,
        level: str = STRICTEST,
        *,
        packages: Sequence[str] = PACKAGES,
        concurrency: int | None = None,
        weaker: bool = False,
    ) -> None:
        """Store the settings; nothing is started yet.

        Args:
            limits: the most that a call may use.
            level: a `Level`, or "strictest" for the strictest one that holds here, if code cannot
                use the user's files there.
            packages: those that code may import besides the standard library, along with what they
                need; each interpreter imports all of them once.
            concurrency: the number of calls at once, each with an interpreter; one for each core by
                default.
            weaker: whether "strictest" may mean a level at which it can; to find out what holds.

        Raises `SandboxError` for an unknown level.
        """
        if level not in (STRICTEST, *Level):
            known = ", ".join((STRICTEST, *Level))
            raise SandboxError(f"the Python tool has no level {level!r}; it has {known}")
        self._open = weaker or level != STRICTEST
        self._levels = CANDIDATES if level == STRICTEST else (Level(level),)
        self._limits = limits or Limits()
        self._packages = tuple(packages)
        self._slots = asyncio.Semaphore(concurrency or len(os.sched_getaffinity(0)))
        self._idle: list[KeeperProcess] = []

    async def __aenter__(self) -> PythonTool:
        """Start and test the tool. Raises `SandboxError` if the level does not hold; a level that
        was not named must keep code from files.
        """
        reasons = []
        for level in self._levels:
            self.level = level
            try:
                self.findings = await self._test()
            except SandboxError as error:
                reasons.append(str(error))
            else:
                self.refused = tuple(reasons)
                if self._open or level.includes(Level.LANDLOCK):
                    return self
                await self.__aexit__(None, None, None)
                reasons.append(f"what holds is {level.told()}; to run code there, name that level: {named(level)}")
                break
        raise SandboxError("; ".join(reasons))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all interpreters."""
        await asyncio.gather(*(keeper.stop() for keeper in self._idle))
        self._idle.clear()

    async def run(self, code: str, *, timeout_s: float | None = None) -> Outcome:
        """Run code, which may be any text, and return the outcome; `timeout_s` replaces that of the
        limits.

        A call whose interpreter was lost is run again, in another one. Raises `SandboxError` when
        the kernel refuses a barrier; then the code has not run.
        """
        async with self._slots:
            for _ in range(_ATTEMPTS):
                keeper = self._idle.pop() if self._idle else await self._start()
                try:
                    return await self._asked(keeper, code, timeout_s)
                except KeeperLost:
                    continue
        cause = f"the interpreter that ran it was lost {_ATTEMPTS} times"
        return Outcome(status=Status.KILLED, stdout="", stderr="", truncated=False, cause=cause, ms=0.0)

    async def _asked(self, keeper: KeeperProcess, code: str, timeout_s: float | None) -> Outcome:
        seconds = timeout_s or self._limits.timeout_s
        try:
            answer = await keeper.ask({"code": code, "timeout_s": seconds}, seconds)
        except BaseException:
            await keeper.stop()
            raise
        self._idle.append(keeper)
        if refusal := answer.get("refused"):
            raise SandboxError(f"level {self.level} does not hold: {refusal}")
        return Outcome(**{**answer, "status": Status(answer["status"])})

    async def _start(self) -> KeeperProcess:
        return await KeeperProcess.start(self.level, self._limits, self._packages)

    async def _test(self) -> tuple[Finding, ...]:
        """Return the findings of the self-test at the level. Raises `SandboxError`."""
        try:
            findings = await tried(self.run, self.level, self._limits)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        passed = [finding.attempt for finding in findings if not finding.held]
        if passed:
            await self.__aexit__(None, None, None)
            raise SandboxError(f"level {self.level} does not hold: code gets through at {', '.join(passed)}")
        return findings
