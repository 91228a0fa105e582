"""The self-test at start-up: runs code that tries to get past each barrier of a level."""

from __future__ import annotations

import errno
import os
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from agentr_core.tools.python.levels import Level
from agentr_core.tools.python.limits import Limits, Outcome, Status


@dataclass(frozen=True)
class Attempt:
    """One way out of the sandbox, and the lowest level that closes it."""

    name: str
    level: Level
    code: str
    """Prints "held" if the barrier held, and anything else if it did not."""
    ends: Status = Status.OK
    """The required end of the call; anything but `ok` is by itself proof that the barrier held."""
    timeout_s: float = 60.0
    """Long enough for a busy machine."""

    def is_held(self, outcome: Outcome) -> bool:
        """Return whether the barrier held."""
        return outcome.status is self.ends and (self.ends is not Status.OK or outcome.stdout.strip() == "held")


@dataclass(frozen=True)
class Finding:
    """The result of one attempt."""

    attempt: str
    level: Level
    held: bool


async def tried(
    run: Callable[..., Awaitable[Outcome]], level: Level, limits: Limits, *, beyond: bool = False
) -> tuple[Finding, ...]:
    """Run the attempts on the barriers of a level one by one, and return the findings.

    Args:
        run: `PythonTool.run`.
        level: the level that `run` promises.
        limits: the limits that `run` promises.
        beyond: also try the barriers of stricter levels, to see that the attempts are real.
    """
    findings = []
    for attempt in attempts(limits):
        if beyond or level.includes(attempt.level):
            outcome = await run(attempt.code, timeout_s=attempt.timeout_s)
            findings.append(Finding(attempt.name, attempt.level, attempt.is_held(outcome)))
    return tuple(findings)


def attempts(limits: Limits) -> tuple[Attempt, ...]:
    """Return all attempts; those on limits slightly exceed them."""
    return (*_on_everything(), *_on_limits(limits), *_on_calls(), *_on_files(), *_on_namespaces())


def _on_everything() -> list[Attempt]:
    return [
        Attempt("what is allowed", Level.NONE, _ALLOWED),
        Attempt("endless loop", Level.NONE, "while True: pass", Status.TIMEOUT, timeout_s=0.2),
    ]


def _on_limits(limits: Limits) -> list[Attempt]:
    known = asdict(limits)
    closed = {
        "memory": ("import mmap\nmmap.mmap(-1, ({memory_mb} + 64) << 20)", errno.ENOMEM),
        "size of a file": ("open('big', 'wb').truncate(({disk_mb} << 20) + 1)", errno.EFBIG),
        "open files": ("held = [open('/dev/null') for _ in range({open_files})]", errno.EMFILE),
        "another user": ("os.setuid(0 if os.getuid() else 1)", errno.EPERM),
    }
    return [
        Attempt(name, Level.LIMITS, _attempt(code.format(**known), number)) for name, (code, number) in closed.items()
    ]


def _on_calls() -> list[Attempt]:
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
    raw = {
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
    scripts |= {name: f"call({row[column]}, {str(row[2:])[1:-1]})" for name, row in raw.items()}
    return [Attempt(name, Level.SECCOMP, _attempt(code, errno.EPERM, errno.ENOSYS)) for name, code in scripts.items()]


def _on_files() -> list[Attempt]:
    scripts = {
        "file outside": "open('/etc/passwd').read()",
        "folder outside": "os.listdir('/')",
        "writing outside": "open('../escape', 'w').write('out')",
        "environment of the parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "processes of others": "open('/proc/1/status').read()",
    }
    # If a file does not exist, nothing gets out either.
    closed = (errno.EACCES, errno.EPERM, errno.ENOENT)
    return [Attempt(name, Level.LANDLOCK, _attempt(code, *closed)) for name, code in scripts.items()]


def _on_namespaces() -> list[Attempt]:
    code = _attempt("os.stat('/etc/passwd')", errno.ENOENT)
    return [Attempt("name of a file outside", Level.BUBBLEWRAP, code)]


def _attempt(code: str, *refusals: int) -> str:
    """Return code that prints "held" if the kernel refuses with one of these error numbers."""
    return _FRAME.format(code=textwrap.indent(code, "    "), refusals=refusals)


_FRAME = """
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

_ALLOWED = """
import threading
seen = []
thread = threading.Thread(target=seen.append, args=["a thread"])
thread.start()
thread.join()
with open("note", "w") as file:
    file.write("a file")
print("held" if [open("note").read(), *seen] == ["a file", "a thread"] else "it does not work")
"""
