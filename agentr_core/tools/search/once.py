"""Answers equal calls only once: from memory, from the store, or by another thread's call that is
under way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from agentr_core.protocols.abilities import Kept
from agentr_core.tools.search.together import Together
from agentr_core.types import ToolCall

ANSWERED: Final = ("ok", "empty")
"""The statuses whose answers are kept. A call that failed is made again the next time."""


class Once:
    """A cache that answers equal calls only once. Threads may share it.

    Args:
        kept: the store where answers are looked up and kept; None means memory alone. Answers that
            other processes keep there later are not seen. Simultaneous reads or writes are done
            together.
        most: the most answers held in memory; the least recently used is dropped first.
    """

    def __init__(self, kept: Kept | None = None, *, most: int = 10_000) -> None:
        self._kept = kept
        self._most = most
        self._held: OrderedDict[str, ToolCall] = OrderedDict()
        self._under_way: dict[str, Future[ToolCall]] = {}
        self._lock = threading.Lock()
        self._there: Collection[str] | None = None
        self._listing = threading.Lock()
        if kept is not None:
            self._found, self._stored = Together(kept.find), Together(_keeping(kept))

    def answer(self, call: ToolCall, ask: Callable[[ToolCall], ToolCall]) -> tuple[ToolCall, bool]:
        """Return the call with its answer, and whether the answer came from another call. Raises as
        `ask`, also in threads that wait for the same answer.

        Args:
            call: the call to answer; its status and output are ignored.
            ask: a function that returns the call with its status and output.
        """
        identity = call.identity
        with self._lock:
            if identity in self._held:
                self._held.move_to_end(identity)
                return self._held[identity], True
            other = self._under_way.get(identity)
            if other is None:
                mine = self._under_way[identity] = Future()
        if other is not None:
            return other.result(), True
        try:
            answered, known = self._find(call, ask)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(answered)
            return answered, known
        finally:
            with self._lock:
                del self._under_way[identity]

    def _find(self, call: ToolCall, ask: Callable[[ToolCall], ToolCall]) -> tuple[ToolCall, bool]:
        there = self._kept is not None and call.identity in self._known(self._kept)
        found = self._found.through(call) if there else None
        answered = ask(call) if found is None else found
        if answered.status in ANSWERED:
            if self._kept is not None and found is None:
                self._stored.through(answered)
            self._hold(call.identity, answered)
        return answered, found is not None

    def _known(self, kept: Kept) -> Collection[str]:
        """Return the identities that were kept at the first call of this method."""
        with self._listing:
            if self._there is None:
                self._there = kept.identities()
            return self._there

    def _hold(self, identity: str, answered: ToolCall) -> None:
        with self._lock:
            self._held[identity] = answered
            while len(self._held) > self._most:
                self._held.popitem(last=False)


def _keeping(kept: Kept) -> Callable[[Sequence[ToolCall]], Mapping[str, ToolCall]]:
    def keep(calls: Sequence[ToolCall]) -> Mapping[str, ToolCall]:
        kept.keep(calls)
        return {}

    return keep
