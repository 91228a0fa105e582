"""Combines simultaneous calls of several threads to a store into one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from agentr_core.types import ToolCall


class Together:
    """A combiner of the calls of several threads to one function: calls that arrive while it works
    are passed to it together next.

    Args:
        work: a function that takes different calls, and returns the results for some of them, by
            identity.
    """

    def __init__(self, work: Callable[[Sequence[ToolCall]], Mapping[str, ToolCall]]) -> None:
        self._work = work
        self._waiting: list[ToolCall] = []
        self._done: dict[str, ToolCall] = {}
        self._lock = threading.Lock()
        self._working = threading.Lock()

    def through(self, call: ToolCall) -> ToolCall | None:
        """Return the result for a call, or None, once the function has handled it. Raises as the
        function; the other calls of a failed batch are tried again by the threads that wait for
        them.
        """
        with self._lock:
            self._waiting.append(call)
        with self._working:
            with self._lock:
                together, self._waiting = self._waiting, []
            try:
                found = self._work(together) if together else {}
            except BaseException:
                with self._lock:
                    self._waiting = [one for one in together if one is not call] + self._waiting
                raise
            with self._lock:
                self._done |= found
        with self._lock:
            return self._done.pop(call.identity, None)
