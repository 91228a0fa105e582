"""A database file that stays open between bursts that follow each other at once.

Opening a store costs more than most bursts on it: DuckDB reads every table and binds every view,
which takes 8 ms of processor time (and 2 ms to close it), a few hundred times in a short run. So a
file may stay open, and locked, for a moment after a burst. Others hardly wait longer for that: a
thread looks every 10 ms whether somebody asks for the lock.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb

from agentr_core.store import lock

_KEEP_OPEN_S = 0.05
"""The longest time without a burst for which a file stays open."""
_CHECK_INTERVAL_S = 0.01
"""The interval at which an open file is checked for others that wait for it, in seconds."""


@dataclass(frozen=True)
class OpenFile:
    """An instance of DuckDB that has a database file open; closing `stack` closes the file and
    releases its lock.
    """

    instance: Any
    read_only: bool
    stack: ExitStack


class KeepAlive:
    """Keeps the file of the database at `path` open between bursts. A thread closes it after
    `_KEEP_OPEN_S` without a burst, or when others wait for it, or at the end of the context.
    Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: OpenFile | None = None
        self._idle_since = 0.0
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._close_when_due, name="store keep-alive", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def take(self, *, read_only: bool) -> OpenFile | None:
        """Return the open file, which the caller must then close or give back; None if there is
        none that will do. A reader may get a file that is open for writing.
        """
        with self._changed:
            file, self._file = self._file, None
        if file is None or read_only or not file.read_only:
            return file
        file.stack.close()
        return None

    def give(self, file: OpenFile) -> None:
        """Keep a file open for a while, or close it at once if somebody waits for it."""
        if lock.has_waiters(self._path):
            file.stack.close()
            return
        with self._changed:
            # Another reading thread may have given back its own file already.
            surplus_file = file if self._is_closing or self._file is not None else None
            if surplus_file is None:
                self._file, self._idle_since = file, time.monotonic()
                self._changed.notify()
        if surplus_file is not None:
            surplus_file.stack.close()

    def _close_when_due(self) -> None:
        while True:
            with self._changed:
                if self._file is None:
                    if self._is_closing:
                        return
                    self._changed.wait()
                    continue
                is_due = (
                    self._is_closing
                    or time.monotonic() - self._idle_since >= _KEEP_OPEN_S
                    or lock.has_waiters(self._path)
                )
                file = self._file if is_due else None
                if file is None:
                    self._changed.wait(_CHECK_INTERVAL_S)
                    continue
                self._file = None
            # All bursts on it have ended; a fault of the file is reported when it is next opened.
            with suppress(duckdb.Error):
                file.stack.close()
