"""A fork server: a warm interpreter that forks one confined process for each call.

It is run as `python -c ... main()`. Requests come on standard input and answers go to standard
output, one line of JSON each; the first line has the settings. It runs one call at a time, and ends
when its input ends. It has only its main thread, since it forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core.tools.python import child, confinement
from agentr_core.tools.python.child import EXCEPTION, MEMORY
from agentr_core.tools.python.confinement import MIB, Level, Limits, Status, confine

# Supervision of running code by the fork server: it reads the output, checks the time, the tasks
# and the files, and kills all processes that are left at the end.

_TICK_S = 0.02
"""Seconds between two checks of tasks and files."""
_CHUNK = 1 << 16


class Watch:
    """Supervises one call, a child of this process. This process is a subreaper: orphaned
    descendants of the child become its children, so that all of them can be killed.

    Args:
        process: the id of the child.
        stdout, stderr: the read ends of the pipes to which it prints; `wait` closes them.
        folder: its working folder.
    """

    def __init__(self, process: int, stdout: int, stderr: int, limits: Limits, folder: Path) -> None:
        self._process = process
        self._output = {stdout: bytearray(), stderr: bytearray()}
        self._stderr = stderr
        self._printed = 0
        self._limits = limits
        self._folder = folder

    def wait(self, deadline: float) -> dict[str, Any]:
        """Wait for the end of the call, kill all its processes, and return the fields of its
        `Outcome` other than `ms`.

        The call is ended early at the deadline (of `time.monotonic`), when it exceeds a limit, and
        when there is input for this process or its input ends, since nobody then waits for the
        call.
        """
        process_fd = os.pidfd_open(self._process)
        try:
            cause = self._observe(process_fd, deadline)
            status = self._end()
            # All writers have been killed, so this reads what is left in the pipes.
            for descriptor in self._output:
                while self._read(descriptor):
                    pass
        finally:
            os.close(process_fd)
            for descriptor in self._output:
                os.close(descriptor)
        limit = self._limits.output_bytes
        texts: list[str] = []
        for descriptor, data in self._output.items():
            # Of standard error the end is kept, where a traceback says what happened.
            part = data[-limit:] if descriptor == self._stderr else data[:limit]
            texts.append(part.decode("utf-8", errors="replace"))
        stdout, stderr = texts
        truncated = any(len(data) > limit for data in self._output.values())
        kind, detail = _outcome(status, cause, self._limits)
        if kind is Status.OK and not stdout.strip():
            kind = Status.EMPTY
        return {"status": kind, "stdout": stdout, "stderr": stderr, "truncated": truncated, "cause": detail}

    def _observe(self, process_fd: int, deadline: float) -> str:
        """Read the output until the call ends or must be ended. Return the cause, or "" if its
        process has ended by itself.
        """
        poll = select.poll()
        for descriptor in (process_fd, 0, *self._output):
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
                if descriptor == process_fd:
                    return ""
                if descriptor == 0:
                    return "abandoned"
                if not self._read(descriptor):
                    poll.unregister(descriptor)

    def _excess(self) -> str:
        """Return which limit the call exceeds, of those that the kernel does not enforce (tasks,
        files, disk space, printed output); "" for none.
        """
        limits = self._limits
        # RLIMIT_NPROC would count all processes of the user, and does not apply to root.
        tasks = sum(len(_list_dir(f"/proc/{process}/task")) for process in _descendants(os.getpid()))
        if tasks > limits.tasks:
            return f"more than {limits.tasks} threads and processes"
        sizes = []
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with suppress(OSError):
                    sizes.append(os.stat(f"{folder}/{name}", follow_symlinks=False).st_blocks * 512)  # noqa: PTH116
        if len(sizes) > limits.files:
            return f"more than {limits.files} files"
        if sum(sizes) > limits.disk_mb * MIB:
            return f"more than {limits.disk_mb} MiB in files"
        if self._printed > limits.disk_mb * MIB:
            return f"more than {limits.disk_mb} MiB printed"
        return ""

    def _read(self, descriptor: int) -> int:
        data = os.read(descriptor, _CHUNK)
        buffer = self._output[descriptor]
        buffer += data
        # One byte more than the limit is kept, to know whether output was dropped.
        limit = self._limits.output_bytes + 1
        del buffer[slice(None, -limit) if descriptor == self._stderr else slice(limit, None)]
        self._printed += len(data)
        return len(data)

    def _end(self) -> int:
        """Kill all processes of the call that are left, and return the wait status of its first
        process.
        """
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


def _outcome(status: int, cause: str, limits: Limits) -> tuple[Status, str]:
    """Return the status and the cause for an `Outcome`, given the wait status of the process, and
    the cause for which the call was ended ("" if it was not).
    """
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
    descendants: list[int] = []
    ahead = [process]
    while ahead:
        parent = ahead.pop()
        for task in _list_dir(f"/proc/{parent}/task"):
            with suppress(OSError):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text(encoding="ascii")
                ahead += map(int, children.split())
        descendants.append(parent)
    return descendants[1:]


def _list_dir(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, many times a second
    except OSError:
        return []


_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Paths that a library may need when it is loaded only during a call."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main() -> None:
    """Answer one line with the settings (`ready` or `refused`), then serve calls until standard
    input ends.
    """
    source = sys.stdin.buffer
    settings = json.loads(source.readline())
    try:
        server = ForkServer(**settings)
    except (ImportError, OSError) as error:
        _answer({"refused": str(error)})
        return
    _answer({"ready": True})
    while line := source.readline():
        _answer(server.call(**json.loads(line)))


class ForkServer:
    """A warm interpreter, with the packages imported, that forks a process for each call."""

    def __init__(self, level: str, limits: dict[str, Any], packages: list[str], folder: str) -> None:
        """Import the packages, prepare the barriers of the level and, from level `limits` on, give
        up all capabilities. The working folder of calls is made in `folder`.

        Raises `ImportError` for a package that is not installed, and `OSError` if the kernel
        refuses a barrier.
        """
        self._level = Level(level)
        self._limits = Limits(**limits)
        self._folder = Path(folder) / "work"
        self._folder.mkdir(mode=0o700)
        before = set(sys.modules)
        for name in packages:
            importlib.import_module(name)
        if "numpy" in packages:
            # Otherwise it would be loaded at its first use in a call, with a random seed.
            importlib.import_module("numpy.random")
        dependencies = frozenset(name.partition(".")[0] for name in set(sys.modules) - before)
        self._rules = -1
        if self._level.includes(Level.LANDLOCK):
            # The standard library, without the packages that may be installed in its folder.
            stdlib = sysconfig.get_path("stdlib")
            library = (f"{stdlib}/{name}" for name in os.listdir(stdlib) if not name.endswith("-packages"))  # noqa: PTH208
            # The folders of the packages, and of the shared libraries in their wheels.
            paths = []
            for name in (dependencies | set(packages)) - sys.stdlib_module_names:
                folders = [*getattr(sys.modules[name], "__path__", ())]
                paths += folders or [getattr(sys.modules[name], "__file__", None) or ""]
                paths += [f"{folder}.libs" for folder in folders]
            readable = (*_SYSTEM, *_DEVICES, *library, *filter(None, paths))
            self._rules = confinement.ruleset(readable, str(self._folder), confinement.abi())
        confinement.prctl(confinement.PR_SET_CHILD_SUBREAPER, 1)
        if self._level.includes(Level.LIMITS):
            confinement.drop_privileges()
        os.environ.update(HOME=str(self._folder), TMPDIR=str(self._folder))
        child.prepare(packages, dependencies)
        gc.collect()
        gc.disable()
        # The objects so far are left out of garbage collection, which would write to the memory
        # pages that all children share.
        gc.freeze()

    def call(self, code: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Run code in a forked process, empty the working folder afterwards, and return the fields
        of an `Outcome`; if the kernel refuses a barrier, so that the code is not run, `refused`
        with the reason.
        """
        start = time.monotonic()
        limits = replace(self._limits, timeout_s=timeout_s) if timeout_s else self._limits
        watch = self._start(code, limits)
        if isinstance(watch, str):
            return {"refused": watch}
        outcome = watch.wait(start + limits.timeout_s)
        # The folder is emptied and not replaced, since Landlock's rules refer to it.
        for entry in os.scandir(self._folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)  # noqa: PTH108
        return {**outcome, "ms": 1000 * (time.monotonic() - start)}

    def _start(self, code: str, limits: Limits) -> Watch | str:
        """Fork a process that runs the code, and return its watch once all barriers are set; if one
        could not be set, the reason.
        """
        ready, ready_end = os.pipe()
        stdout, stdout_end = os.pipe()
        stderr, stderr_end = os.pipe()
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                self._become(code, parent, ready_end, stdout_end, stderr_end)
            finally:
                os._exit(child.EXCEPTION)
        for descriptor in (ready_end, stdout_end, stderr_end):
            os.close(descriptor)
        watch = Watch(process, stdout, stderr, limits, self._folder)
        with open(ready, "rb") as barrier:  # noqa: PTH123 - a descriptor
            if refusal := barrier.read().decode():
                watch.wait(time.monotonic())
                return refusal
        return watch

    def _become(self, code: str, parent: int, ready_end: int, stdout: int, stderr: int) -> None:
        """Confine this process, the child, tell the parent by closing `ready_end`, run the code and
        exit. If a barrier is refused, write the reason to `ready_end` and exit. Never returns.
        """
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        # Close all descriptors above standard error but `ready_end` and Landlock's rules.
        low = 3
        for descriptor in (*sorted(n for n in (ready_end, self._rules) if n >= low), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, descriptor)
            low = descriptor + 1
        try:
            confine(self._level, self._limits, str(self._folder), self._rules, parent)
        except OSError as error:
            os.write(ready_end, str(error).encode())
            os._exit(child.EXCEPTION)
        os.close(ready_end)
        gc.enable()
        os._exit(child.run(code))


def _answer(data: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")
        sys.stdout.flush()
