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
from agentr_core.tools.python.child import EXCEPTION_STATUS, MEMORY_STATUS
from agentr_core.tools.python.confinement import MIB, Level, Limits, Status, confine

# Supervision of running code by the fork server: it reads the output, checks the time, the tasks
# and the files, and kills all processes that are left at the end.

_CHECK_INTERVAL_S = 0.02
"""Seconds between two checks of tasks and files."""
_CHUNK_BYTES = 1 << 16


class CallSupervisor:
    """Supervises one call, a child of this process. This process is a subreaper: orphaned
    descendants of the child become its children, so that all of them can be killed.

    Args:
        pid: the id of the child.
        stdout, stderr: the read ends of the pipes to which it prints; `wait` closes them.
        folder: its working folder.
    """

    def __init__(self, pid: int, stdout: int, stderr: int, limits: Limits, folder: Path) -> None:
        self._pid = pid
        self._output = {stdout: bytearray(), stderr: bytearray()}
        self._stderr = stderr
        self._num_printed_bytes = 0
        self._limits = limits
        self._folder = folder

    def wait(self, deadline: float) -> dict[str, Any]:
        """Wait for the end of the call, kill all its processes, and return the fields of its
        `Outcome` other than `ms`.

        The call is ended early at the deadline (of `time.monotonic`), when it exceeds a limit, and
        when there is input for this process or its input ends, since nobody then waits for the
        call.
        """
        process_fd = os.pidfd_open(self._pid)
        try:
            cause = self._wait_for_end(process_fd, deadline)
            wait_status = self._kill_all()
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
            kept_data = data[-limit:] if descriptor == self._stderr else data[:limit]
            texts.append(kept_data.decode("utf-8", errors="replace"))
        stdout, stderr = texts
        truncated = any(len(data) > limit for data in self._output.values())
        call_status, cause_text = _status_and_cause(wait_status, cause, self._limits)
        if call_status is Status.OK and not stdout.strip():
            call_status = Status.EMPTY
        return {"status": call_status, "stdout": stdout, "stderr": stderr, "truncated": truncated, "cause": cause_text}

    def _wait_for_end(self, process_fd: int, deadline: float) -> str:
        """Read the output until the call ends or must be ended. Return the cause, or "" if its
        process has ended by itself.
        """
        poll = select.poll()
        for descriptor in (process_fd, 0, *self._output):
            poll.register(descriptor, select.POLLIN)
        next_check = time.monotonic() + _CHECK_INTERVAL_S
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_check:
                if cause := self._exceeded_limit():
                    return cause
                next_check = now + _CHECK_INTERVAL_S
            for descriptor, _ in poll.poll(1000 * max(0.0, min(next_check, deadline) - now)):
                if descriptor == process_fd:
                    return ""
                if descriptor == 0:
                    return "abandoned"
                if not self._read(descriptor):
                    poll.unregister(descriptor)

    def _exceeded_limit(self) -> str:
        """Return which limit the call exceeds, of those that the kernel does not enforce (tasks,
        files, disk space, printed output); "" for none.
        """
        limits = self._limits
        # RLIMIT_NPROC would count all processes of the user, and does not apply to root.
        tasks = sum(len(_list_dir(f"/proc/{pid}/task")) for pid in _descendants(os.getpid()))
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
        if self._num_printed_bytes > limits.disk_mb * MIB:
            return f"more than {limits.disk_mb} MiB printed"
        return ""

    def _read(self, descriptor: int) -> int:
        data = os.read(descriptor, _CHUNK_BYTES)
        buffer = self._output[descriptor]
        buffer += data
        # One byte more than the limit is kept, to know whether output was dropped.
        limit = self._limits.output_bytes + 1
        del buffer[slice(None, -limit) if descriptor == self._stderr else slice(limit, None)]
        self._num_printed_bytes += len(data)
        return len(data)

    def _kill_all(self) -> int:
        """Kill all processes of the call that are left, and return the wait status of its first
        process.
        """
        first_wait_status = 0
        while True:
            for pid in _descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, wait_status = os.waitpid(-1, 0)
            except ChildProcessError:
                return first_wait_status
            if pid == self._pid:
                first_wait_status = wait_status


def _status_and_cause(wait_status: int, cause: str, limits: Limits) -> tuple[Status, str]:
    """Return the status and the cause for an `Outcome`, given the wait status of the process, and
    the cause for which the call was ended ("" if it was not).
    """
    if cause == "timeout":
        return Status.TIMEOUT, f"more than {limits.timeout_s:g} s"
    if cause:
        return Status.KILLED, cause
    if os.WIFSIGNALED(wait_status):
        signal_number = os.WTERMSIG(wait_status)
        if signal_number == signal.SIGXCPU:
            return Status.TIMEOUT, f"more than {limits.cpu_s} s of processor time"
        return Status.KILLED, signal.Signals(signal_number).name
    exit_status = os.WEXITSTATUS(wait_status)
    if exit_status == MEMORY_STATUS:
        return Status.MEMORY, f"more than {limits.memory_mb} MiB"
    if exit_status == 0:
        return Status.OK, ""
    return Status.EXCEPTION, "" if exit_status == EXCEPTION_STATUS else f"exit status {exit_status}"


def _descendants(pid: int) -> list[int]:
    """Return all descendants of a process: its children, their children and so on."""
    descendants: list[int] = []
    pending = [pid]
    while pending:
        parent_pid = pending.pop()
        for task in _list_dir(f"/proc/{parent_pid}/task"):
            with suppress(OSError):
                children = Path(f"/proc/{parent_pid}/task/{task}/children").read_text(encoding="ascii")
                pending += map(int, children.split())
        descendants.append(parent_pid)
    return descendants[1:]


def _list_dir(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, many times a second
    except OSError:
        return []


_SYSTEM_PATHS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Paths that a library may need when it is loaded only during a call."""
_DEVICE_PATHS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main() -> None:
    """Answer one line with the settings (`ready` or `refused`), then serve calls until standard
    input ends.
    """
    input_stream = sys.stdin.buffer
    settings = json.loads(input_stream.readline())
    try:
        server = ForkServer(**settings)
    except (ImportError, OSError) as error:
        _write_answer({"refused": str(error)})
        return
    _write_answer({"ready": True})
    while line := input_stream.readline():
        _write_answer(server.call(**json.loads(line)))


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
        modules_before = set(sys.modules)
        for name in packages:
            importlib.import_module(name)
        if "numpy" in packages:
            # Otherwise it would be loaded at its first use in a call, with a random seed.
            importlib.import_module("numpy.random")
        dependencies = frozenset(name.partition(".")[0] for name in set(sys.modules) - modules_before)
        self._rules_fd = -1
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
            readable = (*_SYSTEM_PATHS, *_DEVICE_PATHS, *library, *filter(None, paths))
            self._rules_fd = confinement.create_ruleset(readable, str(self._folder), confinement.landlock_abi())
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
        supervisor = self._fork_call(code, limits)
        if isinstance(supervisor, str):
            return {"refused": supervisor}
        outcome = supervisor.wait(start + limits.timeout_s)
        # The folder is emptied and not replaced, since Landlock's rules refer to it.
        for entry in os.scandir(self._folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)  # noqa: PTH108
        return {**outcome, "ms": 1000 * (time.monotonic() - start)}

    def _fork_call(self, code: str, limits: Limits) -> CallSupervisor | str:
        """Fork a process that runs the code, and return its supervisor once all barriers are set;
        if one could not be set, the reason.
        """
        ready_read_end, ready_write_end = os.pipe()
        stdout_read_end, stdout_write_end = os.pipe()
        stderr_read_end, stderr_write_end = os.pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._run_child(code, parent_pid, ready_write_end, stdout_write_end, stderr_write_end)
            finally:
                os._exit(child.EXCEPTION_STATUS)
        for descriptor in (ready_write_end, stdout_write_end, stderr_write_end):
            os.close(descriptor)
        supervisor = CallSupervisor(pid, stdout_read_end, stderr_read_end, limits, self._folder)
        with open(ready_read_end, "rb") as ready_pipe:  # noqa: PTH123 - a descriptor
            if refusal := ready_pipe.read().decode():
                supervisor.wait(time.monotonic())
                return refusal
        return supervisor

    def _run_child(
        self, code: str, parent_pid: int, ready_write_end: int, stdout_write_end: int, stderr_write_end: int
    ) -> None:
        """Confine this process, the child, tell the parent by closing `ready_write_end`, run the
        code and exit. If a barrier is refused, write the reason to `ready_write_end` and exit.
        Never returns.
        """
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout_write_end, 1)
        os.dup2(stderr_write_end, 2)
        # Close all descriptors above standard error but `ready_write_end` and Landlock's rules.
        lowest = 3
        for descriptor in (
            *sorted(fd for fd in (ready_write_end, self._rules_fd) if fd >= lowest),
            os.sysconf("SC_OPEN_MAX"),
        ):
            os.closerange(lowest, descriptor)
            lowest = descriptor + 1
        try:
            confine(self._level, self._limits, str(self._folder), self._rules_fd, parent_pid)
        except OSError as error:
            os.write(ready_write_end, str(error).encode())
            os._exit(child.EXCEPTION_STATUS)
        os.close(ready_write_end)
        gc.enable()
        os._exit(child.run(code))


def _write_answer(data: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")
        sys.stdout.flush()
