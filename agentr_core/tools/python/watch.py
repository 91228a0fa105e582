"""The watch of a keeper over running code: it reads the output, checks the clock, the tasks and the
files, and in the end kills whatever is left.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentr_core.tools.python.child import EXCEPTION, MEMORY
from agentr_core.tools.python.confinement import MIB
from agentr_core.tools.python.limits import Limits, Status

_TICK_S = 0.02
"""Seconds between two checks of tasks and files."""
_CHUNK = 1 << 16


class Watch:
    """The watch over one call, a child of this process. This process is a subreaper: orphaned
    descendants of the child become its children, so that none of them escapes.
    """

    def __init__(self, process: int, stdout: int, stderr: int, limits: Limits, folder: Path) -> None:
        self._process = process
        self._output = {stdout: bytearray(), stderr: bytearray()}
        self._stderr = stderr
        self._printed = 0
        self._limits = limits
        self._folder = folder

    def wait(self, deadline: float) -> dict[str, Any]:
        """Return the outcome of the call without its milliseconds, once all its processes have
        ended.

        A call is ended at the deadline (of `time.monotonic`), when it exceeds a limit, and when
        standard input of this process ends, since nobody then waits for the call.
        """
        ended = os.pidfd_open(self._process)
        try:
            cause = self._observe(ended, deadline)
            status = self._end()
            self._drain()
        finally:
            os.close(ended)
            for descriptor in self._output:
                os.close(descriptor)
        stdout, stderr = (self._text(descriptor) for descriptor in self._output)
        truncated = any(len(data) > self._limits.output_bytes for data in self._output.values())
        kind, why = _judged(status, cause, self._limits)
        if kind is Status.OK and not stdout.strip():
            kind = Status.EMPTY
        return {"status": kind, "stdout": stdout, "stderr": stderr, "truncated": truncated, "cause": why}

    def _observe(self, ended: int, deadline: float) -> str:
        """Return why the call must be ended, or "" if its process has ended by itself."""
        poll = select.poll()
        for descriptor in (ended, 0, *self._output):
            poll.register(descriptor, select.POLLIN)
        look = time.monotonic() + _TICK_S
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= look:
                if cause := self._excess():
                    return cause
                look = now + _TICK_S
            for descriptor, _ in poll.poll(1000 * max(0.0, min(look, deadline) - now)):
                if descriptor == ended:
                    return ""
                if descriptor == 0:
                    return "abandoned"
                if not self._read(descriptor):
                    poll.unregister(descriptor)

    def _excess(self) -> str:
        """Return which limit that the kernel does not enforce is exceeded, or "" if none is."""
        limits = self._limits
        tasks = sum(_threads(process) for process in _descendants(os.getpid()))
        if tasks > limits.tasks:
            return f"more than {limits.tasks} threads and processes"
        sizes = [size for folder, _, names in os.walk(self._folder) for size in _sizes(folder, names)]
        if len(sizes) > limits.files:
            return f"more than {limits.files} files"
        if sum(sizes) > limits.disk_mb * MIB:
            return f"more than {limits.disk_mb} MiB in files"
        if self._printed > limits.disk_mb * MIB:
            return f"more than {limits.disk_mb} MiB printed"
        return ""

    def _read(self, descriptor: int) -> int:
        data = os.read(descriptor, _CHUNK)
        kept = self._output[descriptor]
        kept += data
        # One byte more than is shown tells that output was left out.
        most = self._limits.output_bytes + 1
        del kept[slice(None, -most) if descriptor == self._stderr else slice(most, None)]
        self._printed += len(data)
        return len(data)

    def _drain(self) -> None:
        """Read the remaining output; nobody can write any more."""
        for descriptor in self._output:
            while self._read(descriptor):
                pass

    def _end(self) -> int:
        """Kill all that is left of the call and return the exit status of its first process."""
        first = 0
        while True:
            for process in _descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            try:
                process, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return first
            if process == self._process:
                first = status

    def _text(self, descriptor: int) -> str:
        kept, most = bytes(self._output[descriptor]), self._limits.output_bytes
        # A traceback says at its end what happened.
        return (kept[-most:] if descriptor == self._stderr else kept[:most]).decode("utf-8", errors="replace")


def _judged(status: int, cause: str, limits: Limits) -> tuple[Status, str]:
    """Return the status of a call and its cause, from how its process ended."""
    if cause == "timeout":
        return Status.TIMEOUT, f"more than {limits.timeout_s:g} s"
    if cause:
        return Status.KILLED, cause
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return Status.TIMEOUT, f"more than {limits.cpu_s} s of processor time"
        return Status.KILLED, signal.Signals(number).name
    code = os.WEXITSTATUS(status)
    if code == MEMORY:
        return Status.MEMORY, f"more than {limits.memory_mb} MiB"
    if code == 0:
        return Status.OK, ""
    return Status.EXCEPTION, "" if code == EXCEPTION else f"exit status {code}"


def _descendants(process: int) -> list[int]:
    """Return all descendants of a process: its children, their children and so on."""
    found: list[int] = []
    ahead = [process]
    while ahead:
        parent = ahead.pop()
        for task in _listed(f"/proc/{parent}/task"):
            with suppress(OSError):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text(encoding="ascii")
                ahead += map(int, children.split())
        found.append(parent)
    return found[1:]


def _threads(process: int) -> int:
    return len(_listed(f"/proc/{process}/task"))


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, many times a second
    except OSError:
        return []


def _sizes(folder: str, names: list[str]) -> list[int]:
    found = []
    for name in names:
        with suppress(OSError):
            found.append(os.stat(f"{folder}/{name}", follow_symlinks=False).st_blocks * 512)  # noqa: PTH116
    return found
