"""Values that a forked process cannot share with its parent: threads, connections, process
pools.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process makes for itself on first use. Threads share it.

    After a fork the child has the objects of its parent, but not the threads that serve them: a
    call would wait for ever for an event loop that no thread runs, or for a lock whose holder is
    gone. So the child forgets the value and makes its own. Source: os.fork, "only the thread
    calling fork() exists in the new process".
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of_parents: list[T] = []
        self._made: list[T] = []
        self._making = threading.Lock()
        here = weakref.ref(self)

        def forked() -> None:
            if (it := here()) is not None:
                it._forget()

        os.register_at_fork(after_in_child=forked)

    def get(self) -> T:
        """Return the value of this process. Raises what making it raises; the next call then tries
        again.
        """
        with self._making:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def _forget(self) -> None:
        # Kept alive: the clean-up when it is collected is for the parent process to do.
        self._of_parents += self._made
        self._made, self._making = [], threading.Lock()
