"""The levels of confinement, by name: each has the barriers of those before it and one more."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """A level of confinement; the members are in order of strictness."""

    NONE = "none"
    """Its own process and process group with a time limit, truncated output and an empty
    environment: no barrier at all against malicious code.
    """
    LIMITS = "limits"
    """Also limits on memory, processor time, file size, open files and tasks; no capabilities."""
    SECCOMP = "seccomp"
    """Also a list of the system calls that code may make: no processes, sockets or signals."""
    LANDLOCK = "landlock"
    """Also files: code can read what Python and the allowed packages need, and write only in the
    working folder.
    """
    BUBBLEWRAP = "bubblewrap"
    """Also its own namespaces: other files and processes are invisible."""

    def includes(self, other: Level) -> bool:
        """Return whether the barriers of another level are among those of this one."""
        order = list(Level)
        return order.index(self) >= order.index(other)

    def told(self) -> str:
        """Return the level for a person; of one that leaves files open, also that it does."""
        return self.value + ("" if self.includes(Level.LANDLOCK) else ", where code can use your files")


STRICTEST = "strictest"
"""The name for the strictest level that holds on this machine and keeps code from the user's files;
a weaker one must be named.
"""
CANDIDATES = tuple(level for level in reversed(Level) if level is not Level.NONE)
"""The levels that are tried for `strictest`, in this order: the weaker ones to say which holds."""
