"""`PythonTool`, which runs code in warm, confined interpreters, and its self-test."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from agentr_core.errors import SandboxError
from agentr_core.system import Scratch, source_folder
from agentr_core.tools.python.confinement import CANDIDATE_LEVELS, PACKAGES, STRICTEST, Level, Limits, Outcome, Status

# The self-test at start-up, which runs code that tries to get past each barrier of a level.


@dataclass(frozen=True)
class Attempt:
    """One way to break out of the sandbox, and the lowest level that prevents it."""

    name: str
    level: Level
    code: str
    """Prints "held" if the barrier held, and anything else if it did not."""
    expected_status: Status = Status.OK
    """The status that the call must have; any but `ok` proves by itself that the barrier held."""
    timeout_s: float = 60.0
    """The time limit of the call, in seconds, long enough for a busy machine."""

    def barrier_held(self, outcome: Outcome) -> bool:
        """Return whether the outcome of the code shows that the barrier held."""
        return outcome.status is self.expected_status and (
            self.expected_status is not Status.OK or outcome.stdout.strip() == "held"
        )


@dataclass(frozen=True)
class Finding:
    """The result of one attempt: its name, its level, and whether the barrier held."""

    attempt: str
    level: Level
    barrier_held: bool


async def run_attempts(
    run: Callable[..., Awaitable[Outcome]], level: Level, limits: Limits, *, all_levels: bool = False
) -> tuple[Finding, ...]:
    """Run the attempts on the barriers of a level one after another, and return their findings.

    Args:
        run: `PythonTool.run`.
        level: the level at which `run` runs code.
        limits: the limits under which `run` runs code.
        all_levels: also try the barriers of stricter levels, which shows that these attempts get
            through without their barrier.
    """
    findings = []
    for attempt in attempts(limits):
        if all_levels or level.includes(attempt.level):
            outcome = await run(attempt.code, timeout_s=attempt.timeout_s)
            findings.append(Finding(attempt.name, attempt.level, attempt.barrier_held(outcome)))
    return tuple(findings)


def attempts(limits: Limits) -> tuple[Attempt, ...]:
    """Return the attempts of all levels; those on limits try to exceed `limits` slightly."""
    limit_values = asdict(limits)
    limit_scripts = {
        "memory": ("import mmap\nmmap.mmap(-1, ({memory_mb} + 64) << 20)", errno.ENOMEM),
        "size of a file": ("open('big', 'wb').truncate(({disk_mb} << 20) + 1)", errno.EFBIG),
        "open files": ("held = [open('/dev/null') for _ in range({open_files})]", errno.EMFILE),
        "another user": ("os.setuid(0 if os.getuid() else 1)", errno.EPERM),
    }
    file_scripts = {
        "file outside": "open('/etc/passwd').read()",
        "folder outside": "os.listdir('/')",
        "writing outside": "open('../escape', 'w').write('out')",
        "environment of the parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "processes of others": "open('/proc/1/status').read()",
    }
    # If a file does not exist, the barrier counts as held too.
    error_numbers = (errno.EACCES, errno.EPERM, errno.ENOENT)
    return (
        Attempt("what is allowed", Level.NONE, _ALLOWED_CODE),
        Attempt("endless loop", Level.NONE, "while True: pass", Status.TIMEOUT, timeout_s=0.2),
        *(
            Attempt(name, Level.LIMITS, _attempt_code(code.format(**limit_values), error_number))
            for name, (code, error_number) in limit_scripts.items()
        ),
        *_syscall_attempts(),
        *(Attempt(name, Level.LANDLOCK, _attempt_code(code, *error_numbers)) for name, code in file_scripts.items()),
        Attempt("name of a file outside", Level.BUBBLEWRAP, _attempt_code("os.stat('/etc/passwd')", errno.ENOENT)),
    )


def _syscall_attempts() -> list[Attempt]:
    scripts = {
        "fork": "if not os.fork(): os._exit(0)\nos.wait()",
        "another program": "os.execv('/bin/true', ['true'])",
        "signal to the parent": "os.kill(os.getppid(), 0)",
        "signal by a file": "import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())",
        "TCP socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "UDP socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "unix socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('here')",
        "abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0agentr-' + os.urandom(8).hex())",
        "netlink socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "memory without a name": "os.memfd_create('more')",
        "hidden file": "os.open('.', os.O_TMPFILE | os.O_WRONLY)",
        "cutting what is read": "os.open('.', os.O_RDONLY | os.O_TRUNC)",
        "removal of a file": "open('gone', 'w').close()\nos.unlink('gone')",
        "symbolic link": "os.symlink('/etc', 'out')",
        "mode of a file": "os.chmod('.', 0o700)",
        "limits of the parent": "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
    }
    raw_calls = {
        "ptrace": (101, 117, 0, 0, 0, 0),
        "unshare": (272, 97, 0),
        "setns": (308, 268, -1, 0),
        "mount": (165, 40, 0, 0, 0, 0, 0),
        "io_uring": (425, 425, 0, 0),
        "bpf": (321, 280, -1, 0, 0),
        "keyctl": (250, 219, 0, -3, 0),
        "memory of others": (310, 270, os.getpid(), 0, 0, 0, 0, 0),
        "pidfd": (434, 434, 1, 0),
        "System V memory": (29, 194, 0, 4096, 0o600),
    }
    column = 1 if os.uname().machine == "aarch64" else 0
    scripts |= {name: f"call({row[column]}, {str(row[2:])[1:-1]})" for name, row in raw_calls.items()}
    return [
        Attempt(name, Level.SECCOMP, _attempt_code(code, errno.EPERM, errno.ENOSYS)) for name, code in scripts.items()
    ]


def _attempt_code(code: str, *error_numbers: int) -> str:
    """Return code that runs `code` and prints "held" if the kernel refuses it with one of these
    error numbers.
    """
    return _ATTEMPT_TEMPLATE.format(code=textwrap.indent(code, "    "), refusals=error_numbers)


_ATTEMPT_TEMPLATE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    if libc.syscall(number, *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), number)

try:
{code}
except OSError as error:
    print("held" if error.errno in {refusals} else error)
else:
    print("escaped")
"""

_ALLOWED_CODE = """
import threading
seen = []
thread = threading.Thread(target=seen.append, args=["a thread"])
thread.start()
thread.join()
with open("note", "w") as file:
    file.write("a file")
print("held" if [open("note").read(), *seen] == ["a file", "a thread"] else "it does not work")
"""


# Bubblewrap as an outer layer: the fork server runs in its own namespaces, if the system allows
# user namespaces.

_SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")


def bubblewrap_command(command: list[str], folder: str) -> list[str]:
    """Return a command that runs `command` in its own namespaces: without a network or other
    processes, and with access only to the system's programs, Python and this package (read-only)
    and to one folder (writable). Raises `FileNotFoundError` if bubblewrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("the program `bwrap` is not installed (package `bubblewrap`)")
    package = f"{source_folder()}/agentr_core"
    visible = dict.fromkeys((*_SYSTEM_PATHS, sys.prefix, sys.base_prefix, str(Path(sys.executable).parent), package))
    bind_options = [word for path in visible for word in ("--ro-bind-try", path, path)]
    options = ["--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--bind", folder, folder]
    return [program, *bind_options, *options, "--", *command]


# The client of a fork server: a process that answers one question at a time.

_START_S = 120.0
_GRACE_S = 10.0
"""How many seconds to wait for an answer after the time limit of a call, and for an orderly exit
before the process is killed.
"""
_MAX_LINE_BYTES = 1 << 26
_PROGRAM = "import sys; sys.path.insert(0, {source!r}); from agentr_core.tools.python.fork_server import main; main()"
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PATH": "/usr/bin:/bin",
    # So that sets of strings have the same order in each run.
    "PYTHONHASHSEED": "0",
    # A process that forks must have one thread, and each malloc arena reserves address space.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""All environment variables that a fork server and the code in it see."""


class ForkServerLost(Exception):
    """A fork server has ended, or does not answer in time."""


class ForkServerProcess:
    """The process of a fork server and its temporary folder."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Scratch) -> None:
        """Take over a running process and its folder; `start` creates them."""
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, level: Level, limits: Limits, packages: Sequence[str]) -> ForkServerProcess:
        """Start a fork server with its own folder, and return it once it is ready. Raises
        `SandboxError` if it cannot be started at this level, or does not answer within 130 s.
        """
        folder = Scratch("code")
        program = _PROGRAM.format(source=source_folder())
        command = [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", program]
        try:
            process = await asyncio.create_subprocess_exec(
                *(bubblewrap_command(command, folder.path) if level is Level.BUBBLEWRAP else command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=folder.path,
                env=_ENVIRONMENT | {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            folder.close()
            raise SandboxError(f"level {level} does not hold: {error}") from None
        server = cls(process, folder)
        settings = {"level": level, "limits": asdict(limits), "packages": list(packages), "folder": folder.path}
        try:
            answer = await server.ask(settings, _START_S)
        except ForkServerLost:
            await server.stop()
            raise SandboxError(f"level {level} does not hold: its interpreter does not start") from None
        except BaseException:
            await server.stop()
            raise
        if refusal := answer.get("refused"):
            await server.stop()
            raise SandboxError(f"the Python tool at level {level} does not start: {refusal}")
        return server

    async def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one question, and return the answer. Raises `ForkServerLost` if the server has
        ended, or gives no answer within `timeout_s` plus 10 s.
        """
        stdout, stdin = self._process.stdout, self._process.stdin
        assert stdout is not None
        assert stdin is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            await stdin.drain()
            line = await asyncio.wait_for(stdout.readline(), timeout_s + _GRACE_S)
            # The line is truncated or empty if the fork server ended.
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            raise ForkServerLost(str(error)) from error
        return answer

    async def stop(self) -> None:
        """End the fork server and the call that runs in it, and remove its folder. Waits up to 10 s
        for an orderly end, then kills it.
        """
        stdin = self._process.stdin
        assert stdin is not None
        # At the end of its input the fork server kills its current call. It could not do so if it
        # were killed itself.
        stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._folder.close()


_NUM_TRIES = 2


def level_setting(level: Level) -> str:
    """Return the setting of a recipe that selects a level, for messages."""
    return f"environment.options.sandbox={level}"


class PythonTool:
    """A pool of warm interpreters; each call runs in its own confined process.

        async with PythonTool(Limits(timeout_s=5)) as tool:
            outcome = await tool.run("import math\\nmath.comb(50, 6)")

    Nothing is kept from one call to the next. On entry the tool tests whether code can break out,
    and refuses to work if a barrier of its level does not hold.
    """

    level: Level
    """The level at which code runs; set on entry."""
    findings: tuple[Finding, ...]
    """The findings of the self-test at that level; set on entry."""
    refused: tuple[str, ...]
    """The error messages of the stricter levels that were tried before; set on entry."""

    def __init__(
        self,
        limits: Limits | None = None,
        level: str = STRICTEST,
        *,
        packages: Sequence[str] = PACKAGES,
        concurrency: int | None = None,
        allows_weaker: bool = False,
    ) -> None:
        """Store the settings; nothing is started yet.

        Args:
            limits: the resource limits of a call.
            level: a `Level`, or "strictest" for the strictest one that works on this machine, but
                none at which code can use the user's files.
            packages: the packages that code may import besides the standard library, along with
                their dependencies; each interpreter imports all of them once.
            concurrency: the maximum number of calls at a time, each in an interpreter of its own;
                by default, the number of cores.
            allows_weaker: whether "strictest" may select a level at which code can use the user's
                files; for reports on what works.

        Raises `SandboxError` for an unknown level.
        """
        if level not in (STRICTEST, *Level):
            levels = ", ".join((STRICTEST, *Level))
            raise SandboxError(f"the Python tool has no level {level!r}; it has {levels}")
        self._allows_weaker = allows_weaker or level != STRICTEST
        self._levels = CANDIDATE_LEVELS if level == STRICTEST else (Level(level),)
        self._limits = limits or Limits()
        self._packages = tuple(packages)
        self._call_slots = asyncio.Semaphore(concurrency or len(os.sched_getaffinity(0)))
        self._idle_servers: list[ForkServerProcess] = []

    async def __aenter__(self) -> PythonTool:
        """Select the level and run the self-test at it. Raises `SandboxError` if a barrier of the
        level does not hold; with "strictest", if no allowed level holds.
        """
        reasons = []
        for level in self._levels:
            self.level = level
            try:
                self.findings = await self._run_self_test()
            except SandboxError as error:
                reasons.append(str(error))
            else:
                self.refusals = tuple(reasons)
                if self._allows_weaker or level.includes(Level.LANDLOCK):
                    return self
                await self.__aexit__(None, None, None)
                reasons.append(
                    f"what holds is {level.describe()}; to run code there, name that level: {level_setting(level)}"
                )
                break
        raise SandboxError("; ".join(reasons))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all idle interpreters."""
        await asyncio.gather(*(server.stop() for server in self._idle_servers))
        self._idle_servers.clear()

    async def run(self, code: str, *, timeout_s: float | None = None) -> Outcome:
        """Run code, which may be any text, and return the outcome; `timeout_s` replaces that of the
        limits. Waits until an interpreter is free.

        If the interpreter is lost, the call is run once more, in another one; the status is KILLED
        if that one is lost too. Raises `SandboxError` if an interpreter does not start, or the
        kernel refuses a barrier; the code has not run then.
        """
        async with self._call_slots:
            for _ in range(_NUM_TRIES):
                server = (
                    self._idle_servers.pop()
                    if self._idle_servers
                    else await ForkServerProcess.start(self.level, self._limits, self._packages)
                )
                try:
                    return await self._run_in(server, code, timeout_s)
                except ForkServerLost:
                    continue
        cause = f"the interpreter that ran it was lost {_NUM_TRIES} times"
        return Outcome(status=Status.KILLED, stdout="", stderr="", truncated=False, cause=cause, ms=0.0)

    async def _run_in(self, server: ForkServerProcess, code: str, timeout_s: float | None) -> Outcome:
        call_timeout_s = timeout_s or self._limits.timeout_s
        try:
            answer = await server.ask({"code": code, "timeout_s": call_timeout_s}, call_timeout_s)
        except BaseException:
            await server.stop()
            raise
        self._idle_servers.append(server)
        if refusal := answer.get("refused"):
            raise SandboxError(f"level {self.level} does not hold: {refusal}")
        return Outcome(**{**answer, "status": Status(answer["status"])})

    async def _run_self_test(self) -> tuple[Finding, ...]:
        """Run the self-test at the level, and return its findings. Raises `SandboxError` if an
        interpreter does not start or a barrier does not hold; all interpreters are then ended.
        """
        try:
            findings = await run_attempts(self.run, self.level, self._limits)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        breaches = [finding.attempt for finding in findings if not finding.barrier_held]
        if breaches:
            await self.__aexit__(None, None, None)
            raise SandboxError(f"level {self.level} does not hold: code gets through at {', '.join(breaches)}")
        return findings
