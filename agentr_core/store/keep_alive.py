"""A database file that stays open between bursts that follow each other at once.

To open a store costs more than most bursts on it: DuckDB reads every table and binds every view,
8 ms of processor time (and 2 to close it), a few hundred times in a short run. So a file may stay
open, and locked, for a moment after a burst. Nobody waits longer for that: whoever asks for the
lock meanwhile gets it at the next look.
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

_KEPT_S = 0.05
"""The longest time without a burst for which a file stays open."""
_LOOK_S = 0.01
"""How often an open file is looked at: whether another process waits for it."""


@dataclass(frozen=True)
class OpenFile:
    """An instance of DuckDB that has a database file open; the end of `stack` closes the file and
    releases its lock.
    """

    instance: Any
    read_only: bool
    stack: ExitStack


class KeepAlive:
    """The open file of the database at `path` between bursts. A thread closes it in time; the end
    of the context closes it, too. Safe for use by several threads.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: OpenFile | None = None
        self._since = 0.0
        self._change = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._close_in_time, name="store keep-alive", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._change:
            self._ended = True
            self._change.notify()
        self._thread.join()

    def take(self, *, read_only: bool) -> OpenFile | None:
        """Return the open file, which is then the caller's to close or give back; None if there is
        none that will do. Who only reads may have a file that can be written.
        """
        with self._change:
            file, self._file = self._file, None
        if file is None or read_only or not file.read_only:
            return file
        file.stack.close()
        return None

    def give(self, file: OpenFile) -> None:
        """Keep a file open for a while, or close it at once if somebody waits for it."""
        if lock.wanted(self._path):
            file.stack.close()
            return
        with self._change:
            # Another thread may have given back a file of its own: both read.
            surplus = file if self._ended or self._file is not None else None
            if surplus is None:
                self._file, self._since = file, time.monotonic()
                self._change.notify()
        if surplus is not None:
            surplus.stack.close()

    def _close_in_time(self) -> None:
        while True:
            with self._change:
                if self._file is None:
                    if self._ended:
                        return
                    self._change.wait()
                    continue
                over = self._ended or time.monotonic() - self._since >= _KEPT_S or lock.wanted(self._path)
                file = self._file if over else None
                if file is None:
                    self._change.wait(_LOOK_S)
                    continue
                self._file = None
            # All bursts on it are committed or over; what ails the file is told when it is opened.
            with suppress(duckdb.Error):
                file.stack.close()
