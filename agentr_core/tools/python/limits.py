"""The limits of a call, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from agentr_core.errors import ConfigError

PACKAGES = ("numpy", "sympy")
"""The packages that code may import besides the standard library by default."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one call may use."""

    timeout_s: float = 30.0
    """Seconds of wall-clock time."""
    cpu_s: int = 30
    """Seconds of processor time, of all threads together."""
    memory_mb: int = 512
    """MiB of address space on top of the warm interpreter; from level `limits` on."""
    tasks: int = 32
    """Threads and processes, checked every 20 ms; from level `limits` on."""
    disk_mb: int = 16
    """MiB of all files in the working folder together, of each file, and of all printed output."""
    files: int = 128
    """Files in the working folder, checked every 20 ms."""
    open_files: int = 64
    """File descriptors at once; from level `limits` on."""
    output_bytes: int = 16_384
    """Bytes kept of the beginning of standard output, and of the end of standard error; the rest is
    dropped."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a limit under which nothing can run."""
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"limit {field.name} of the Python tool must be above 0")


class Status(StrEnum):
    """How a call ended."""

    OK = "ok"
    EMPTY = "empty"
    """Without a fault, but without any output."""
    EXCEPTION = "exception"
    """With an exception, or with an exit status above 0."""
    TIMEOUT = "timeout"
    """Out of wall-clock or processor time."""
    MEMORY = "memory"
    """With `MemoryError`."""
    KILLED = "killed"
    """By a signal: its own (a crash), or ours, because it exceeded a limit."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one call."""

    status: Status
    stdout: str
    """The printed text, and the value of a last expression."""
    stderr: str
    """Warnings, and the traceback of an exception."""
    truncated: bool
    """Whether more was printed than is kept."""
    cause: str
    """Why a call was ended or how it crashed, in a few words; empty otherwise."""
    ms: float
    """Milliseconds from the request to the end of the call's process."""
