"""The process that stands for a fork of the warm process: it lends its files, passes signals on,
and ends as the fork does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

PROGRAMS = ("agentr_core.training.worker", "agentr_core.models.local.worker")
"""What a fork may run: modules whose imports take many times as long as what a test has for
them to do.
"""
THAT_KILL_THEMSELVES = ("curricula", "groups")
"""Programs of the tests that a fork may run, too, when they are told where to kill themselves. One
that is killed from outside must be a process of its own: of a fork, the process that stands for it
is gone a moment earlier.
"""
LONGEST = 1 << 17
"""Bytes of a message, at most."""
_READ_BY_IMPORTS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def take_place() -> None:
    """Have a fork of the warm process run the program that this process was started for, and end as
    it does. Return where it cannot.
    """
    program, *words = sys.orig_argv[2:]
    is_forkable = program in PROGRAMS or (program in THAT_KILL_THEMSELVES and len(words) == 2)
    if not is_forkable or not _as_the_warm_process():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
        try:
            warm.connect(os.environ["WARM_PROCESS"])
        except OSError:
            return
        numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
        files = [number for number in numbers if number != warm.fileno() and _is_open(number)]
        request = {"words": sys.orig_argv[2:], "folder": str(Path.cwd()), "env": dict(os.environ), "files": files}
        socket.send_fds(warm, [json.dumps(request).encode()], files)
        fork = int(warm.recv(LONGEST))
        for number in _PASSED_ON:
            signal.signal(number, lambda number, frame: _pass_on(fork, number, frame))
        # Nothing comes where the warm process was killed.
        status = int(warm.recv(LONGEST) or -signal.SIGKILL)
    _end(status)


def _as_the_warm_process() -> bool:
    """Return whether a fork has what this process has from the one that started it: variables that
    imports read, mounts, and memory without a limit.
    """
    return (
        all(os.environ.get(name) == value for name, value in _READ_BY_IMPORTS.items())
        and str(Path("/proc/self/ns/mnt").readlink()) == os.environ["WARM_MOUNTS"]
        and all(resource.getrlimit(kind)[0] == resource.RLIM_INFINITY for kind in _LIMITS)
    )


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _pass_on(fork: int, number: int, frame: FrameType | None) -> None:
    # The fork leads a group of its own, as this process does.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(fork, number)


def _end(status: int) -> None:
    """End with an exit status, or by a signal where it is negative."""
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
