"""Confines a process by its own calls, before it runs code that nobody has read."""

from __future__ import annotations

import os
import resource
import signal

from agentr_core.tools.python import kernel, landlock, seccomp
from agentr_core.tools.python.levels import Level
from agentr_core.tools.python.limits import Limits

MIB = 1 << 20


def confine(level: Level, limits: Limits, folder: str, rules: int, keeper: int) -> None:
    """Confine this process for good at a level; it must have only one thread.

    Args:
        folder: the working folder, the only place where the process may write.
        rules: the descriptor of Landlock's rules; used from level `landlock` on.
        keeper: the process that forked this one; this one dies with it.

    Raises `OSError` if the kernel refuses a barrier.
    """
    os.setsid()
    os.chdir(folder)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    if level.includes(Level.LIMITS):
        _limit(limits)
    if level.includes(Level.LANDLOCK):
        landlock.restrict(rules)
        os.close(rules)
    if level.includes(Level.SECCOMP):
        seccomp.install()


def _limit(limits: Limits) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, _address_space() + limits.memory_mb * MIB),
        (resource.RLIMIT_FSIZE, limits.disk_mb * MIB),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    # When memory runs short, the kernel should kill this process and not the one that trains.
    _write("/proc/self/oom_score_adj", "1000")
    # The signal at the first limit shows what happened; at the second the process is killed.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 - as above
        file.write(text)


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - in a child that lives for milliseconds
        return int(file.read().split()[0]) * resource.getpagesize()
