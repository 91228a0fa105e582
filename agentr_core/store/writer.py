"""The buffering writer between an asyncio program and the store."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self

from agentr_core.errors import StoreBusy
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows, merge

_SHARE = 0.05
"""The share of wall time that the store may take: after a burst of t seconds there is no other for
t / share.
"""
_LONGEST_PAUSE_S = 5.0
_BURSTS_WAITING = 3

log = logging.getLogger(__name__)


class Writer:
    """A buffer that collects units of rows and stores them together, every `interval_s` seconds or
    `max_rows` rows, in a thread.

    A unit (the rows of one `add`) is stored as a whole or not at all. It is safe once the context,
    or a `flush` begun after its `add`, has ended without error; until then it is lost if the
    process is killed. Leaving the context stores what is left, even if the body was cancelled or
    failed.

    Unstored rows are held in memory. A producer awaits `room` before it makes more rows: this
    blocks while the rows of three bursts are waiting.

    `seconds` is the time spent in the store so far, waiting for other processes included.
    """

    def __init__(self, store: Store, *, interval_s: float = 0.5, max_rows: int = 20_000) -> None:
        self.seconds = 0.0
        self._store = store
        self._interval_s = interval_s
        self._max_rows = max_rows
        self._max_waiting = _BURSTS_WAITING * max_rows
        self._units: list[Rows] = []
        self._rows = 0
        self._rows_under_way = 0
        self._tried = asyncio.Event()
        self._last_s = 0.0
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        # One thread: the C library keeps freed memory for each thread that asked for some.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store writer")

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._flush_now_and_then(), name="store writer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake.set()
        if self._task is not None:
            # Its error, if it has one, is about rows that are kept: the flush below tries them
            # again.
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"and {self._rows} rows could not be stored: {fault}")
        finally:
            self._thread.shutdown(wait=False)

    def add(self, unit: Rows) -> None:
        """Take the rows of one unit, by table.

        Raises:
            RuntimeError: the writer is not open.
            AgentrError: the store failed for good in the background.
        """
        self._check()
        self._units.append(unit)
        self._rows += sum(len(rows) for rows in unit.values())
        if self._rows >= self._max_rows:
            self._wake.set()

    async def room(self) -> None:
        """Return once there is room for more rows. Raises as `add` does."""
        self._check()
        while self._rows + self._rows_under_way >= self._max_waiting:
            self._tried.clear()
            await self._tried.wait()
            self._check()

    async def flush(self) -> None:
        """Store all units added so far. Raises as `Store.write`; the units are then kept for
        another attempt.
        """
        # A cancelled caller must not leave the thread's outcome unnoticed.
        await asyncio.shield(asyncio.ensure_future(self._write()))

    def _check(self) -> None:
        if self._task is None or self._closing:
            raise RuntimeError("a Writer takes rows only within its context: `async with Writer(store) as writer`")
        if self._task.done():
            self._task.result()

    async def _write(self) -> None:
        async with self._writing:
            units, self._units = self._units, []
            if not units:
                return
            self._rows_under_way, self._rows = self._rows, 0
            started = time.perf_counter()
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._store_units, units)
            except BaseException:
                self._units = [*units, *self._units]
                self._rows += self._rows_under_way
                raise
            finally:
                self._rows_under_way = 0
                self._tried.set()
                self._last_s = time.perf_counter() - started
                self.seconds += self._last_s

    def _store_units(self, units: list[Rows]) -> None:
        self._store.write(merge(units))

    async def _flush_now_and_then(self) -> None:
        while not self._closing:
            pause = max(self._interval_s, min(self._last_s / _SHARE, _LONGEST_PAUSE_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._write()
            except StoreBusy as error:
                log.warning("%d rows wait for the store: %s", self._rows, error)
