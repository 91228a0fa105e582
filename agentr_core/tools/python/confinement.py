"""Confinement of a process, which it imposes on itself before it runs untrusted code: resource
limits, seccomp and Landlock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache

from agentr_core.errors import ConfigError

# The limits of a call, and its outcome.

PACKAGES = ("numpy", "sympy")
"""The packages that code may import besides the standard library by default."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resource limits of one call."""

    timeout_s: float = 30.0
    """Seconds of wall-clock time."""
    cpu_s: int = 30
    """Seconds of processor time, of all threads together."""
    memory_mb: int = 512
    """MiB of address space on top of the warm interpreter; from level `limits` on."""
    tasks: int = 32
    """Threads and processes, checked every 20 ms; from level `limits` on."""
    disk_mb: int = 16
    """MiB of all files in the working folder together, of any single file, and of all printed
    output.
    """
    files: int = 128
    """Files in the working folder, checked every 20 ms."""
    open_files: int = 64
    """File descriptors at once; from level `limits` on."""
    output_bytes: int = 16_384
    """Bytes kept of the beginning of standard output, and of the end of standard error; the rest is
    dropped."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a limit of 0 or less."""
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
    """By a signal: of its own (a crash), or of the tool, because it exceeded a limit."""


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


# The system calls that code may make, with their numbers on x86-64 and on 64-bit Arm.
#
# All others are refused. Besides the dangerous ones, these are left out on purpose: removing,
# renaming and linking files (a listing of the working folder must show all it holds), reserving
# space in them (`fallocate` fills a disk instantly), memory that no limit counts (`memfd_create`,
# System V), and changing the mode, owner or times of a file, which Landlock does not control.

_SYSCALL_TABLE = """
read 0 63, write 1 64, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69,
pwritev 296 70, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, fsync 74 82, fdatasync 75 83, ftruncate 77 46, fadvise64 221 223, pipe 22 -,
pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19,

mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227,
mincore 27 232, membarrier 324 283,

futex 202 98, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, set_tid_address 218 96,
gettid 186 178, exit 60 93, exit_group 231 94, restart_syscall 219 128, sched_yield 24 124,
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, arch_prctl 158 -, wait4 61 260,
waitid 247 95,

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -,
getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,

clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -, times 100 153,

getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getpgrp 111 -, getpgid 121 155, getsid 124 156,
getgroups 115 158, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, getcpu 309 168,
getrandom 318 278,

clone 56 220, clone3 435 435, kill 62 129, tgkill 234 131, prlimit64 302 261, prctl 157 167,
ioctl 16 29, fcntl 72 25, open 2 -, openat 257 56
"""
"""Name, number on x86-64, and number on 64-bit Arm; "-" for old calls that Arm does not have."""


@cache
def syscall_numbers(machine: str) -> dict[str, int]:
    """Return the numbers by name of the system calls that code may make, some only under the
    conditions in `_filter_program`.

    `machine` is that of `os.uname()`. Raises `OSError` for a machine whose numbers are not known.
    """
    if machine not in ("x86_64", "aarch64"):
        raise OSError(f"the numbers of system calls on {machine} are not known to the Python tool")
    column = 1 if machine == "x86_64" else 2
    rows = [row.split() for row in _SYSCALL_TABLE.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


# The levels of confinement: each has the barriers of those before it and one more.


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
        """Return whether this level has all barriers of another one."""
        order = list(Level)
        return order.index(self) >= order.index(other)

    def describe(self) -> str:
        """Return the name of the level for a message, with a warning if it leaves the user's files
        accessible.
        """
        return self.value + ("" if self.includes(Level.LANDLOCK) else ", where code can use your files")


# There is no fallback to a weaker level with a warning, which could go unseen while code reads the
# user's files.
STRICTEST = "strictest"
"""The name for the strictest level that works on this machine. It must be `landlock` or stricter,
which keep code from the user's files; a weaker level must be named.
"""
CANDIDATE_LEVELS = tuple(level for level in reversed(Level) if level is not Level.NONE)
"""The levels that are tried for `strictest`, in this order. The ones below `landlock` are tried
only to say in the error which level works.
"""


# Linux system calls that Python's standard library does not offer.

# They are called by ctypes, since pyseccomp needs a C library that is often not installed, and the
# package landlock has no rules for TCP and signals.
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make the system call with this number, and return its result. Raises `OSError` with the errno
    if it fails.
    """
    return _check_result(_libc().syscall(ctypes.c_long(number), *map(_c_argument, arguments)), f"system call {number}")


def prctl(option: int, *arguments: int | bytes) -> None:
    """Set a property of this process; see prctl(2). Raises `OSError` if the kernel refuses it."""
    padded_arguments = (*arguments, 0, 0, 0, 0)[:4]
    _check_result(_libc().prctl(ctypes.c_int(option), *map(_c_argument, padded_arguments)), f"prctl {option}")


def drop_privileges() -> None:
    """Give up all capabilities of this process for good: no program that it starts regains any, not
    even a setuid one. Raises `OSError` if the kernel refuses it.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check_result(_libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _c_argument(value: int | bytes | None) -> ctypes.c_void_p | ctypes.c_char_p | ctypes.c_long:
    return ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_long(value or 0)


def _check_result(result: int, operation: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{operation}: {os.strerror(error)}")
    return result


# seccomp-BPF: a permanent filter in front of every system call of a process (seccomp(2)).
#
# The filter lists what is allowed. Everything else is refused with "not permitted", so that code
# gets a `PermissionError` instead of being killed.

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MODE_FILTER = 2
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
"""Instructions of classic BPF: load a word, bitwise and, jump if equal, return; all with a
constant.
"""
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
"""Offsets in `struct seccomp_data`; arguments have 8 bytes each, the low word first."""
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE = 0x00050000 | errno.EPERM
_NOT_IMPLEMENTED = 0x00050000 | errno.ENOSYS
_WORD_MASK = 0xFFFFFFFF

_CLONE_THREAD = 0x00010000
_NEW_NAMESPACES = 0x7E020000
_TMPFILE_BIT = 0o20000000
"""The bit of O_TMPFILE, which creates a file that is listed in no folder."""
_OPEN_FLAGS_MASK = _TMPFILE_BIT | os.O_TRUNC | os.O_ACCMODE
_OPEN_FLAGS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
"""The flags with which a file may be opened, of those in `_OPEN_FLAGS_MASK`. O_TRUNC needs a mode
for writing, since before ABI 3 Landlock does not keep readable files from being truncated.
"""
_PRCTL_OPTIONS = (15, 16, 0x53564D41)
"""The allowed options of prctl: PR_SET_NAME, PR_GET_NAME, PR_SET_VMA."""
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The allowed requests of ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""The allowed commands of fcntl: duplicate, flags, locks; not F_SETOWN, which can send signals to
others.
"""


@dataclass(frozen=True)
class _Condition:
    """A condition on a system call: the argument at a position (from 0), combined with `mask` by
    bitwise and, must be one of `values`.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = _WORD_MASK


def install_filter() -> None:
    """Install the filter in this process for good. The process must have only one thread, and
    `no_new_privs` must be set. Raises `OSError` if the kernel refuses it.
    """
    _install_program(_filter_program(os.uname().machine, os.getpid()))


def _install_program(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a count, padding, a pointer.
    prctl(PR_SET_SECCOMP, _MODE_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))


def _filter_program(machine: str, pid: int) -> bytes:
    """Return the BPF program of the filter for the process with id `pid`, 8 bytes for each
    instruction.
    """
    calls = dict(syscall_numbers(machine))
    instructions = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
    ]
    instructions.append(_instruction(_LOAD, _NUMBER_AT))
    # Without clone3 (ENOSYS), glibc makes threads with `clone`, whose flags a filter can read.
    instructions += _return_if_equal(calls.pop("clone3"), _NOT_IMPLEMENTED)
    conditions = {
        "clone": _Condition(0, (_CLONE_THREAD,), _CLONE_THREAD | _NEW_NAMESPACES),
        "kill": _Condition(0, (pid,)),
        "tgkill": _Condition(0, (pid,)),
        "prlimit64": _Condition(0, (0, pid)),
        "prctl": _Condition(0, _PRCTL_OPTIONS),
        "ioctl": _Condition(1, _IOCTL_REQUESTS),
        "fcntl": _Condition(1, _FCNTL_COMMANDS),
        "open": _Condition(1, _OPEN_FLAGS, _OPEN_FLAGS_MASK),
        "openat": _Condition(2, _OPEN_FLAGS, _OPEN_FLAGS_MASK),
    }
    for name, condition in conditions.items():
        if name in calls:
            value_checks = [
                instruction for value in condition.values for instruction in _return_if_equal(value, _ALLOW)
            ]
            instructions_of_call = [
                _instruction(_LOAD, _ARGUMENTS_AT + 8 * condition.argument),
                _instruction(_AND, condition.mask),
                *value_checks,
                _instruction(_RETURN, _REFUSE),
            ]
            instructions += (_instruction(_EQUAL, calls.pop(name), 0, len(instructions_of_call)), *instructions_of_call)
    for syscall_number in calls.values():
        instructions += _return_if_equal(syscall_number, _ALLOW)
    return b"".join([*instructions, _instruction(_RETURN, _REFUSE)])


def _return_if_equal(number: int, action: int) -> Iterable[bytes]:
    return _instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, action)


def _instruction(opcode: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", opcode, if_true, if_false, constant)


# Landlock: rules on files, TCP, signals and abstract sockets, which a process imposes on itself and
# the kernel enforces (landlock(7)).

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_MAKE_REG = 1 << 8
_TRUNCATE = 1 << 14
_NUM_FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""The number of file rights by ABI version. Versions add to those of version 1: links between
folders (2), truncation (3) and ioctl on devices (5).
"""
_ALL_TCP_RIGHTS = 0b11
"""From ABI 4 on: bind and connect."""
_ALL_SCOPES = 0b11
"""From ABI 6 on: abstract sockets and signals do not reach outside."""

_READ_RIGHTS = _READ_FILE | _READ_DIR
_WORK_FOLDER_RIGHTS = _READ_RIGHTS | _WRITE_FILE | _TRUNCATE | _MAKE_REG
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _TRUNCATE


def landlock_abi() -> int:
    """Return the ABI version of Landlock in this kernel; 0 if it is missing or disabled."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    except OSError:
        return 0


def create_ruleset(readable: Iterable[str], writable: str, abi_version: int) -> int:
    """Create Landlock rules for `restrict`, and return their file descriptor.

    A process under them may read everything below the `readable` paths, create, read and change
    plain files in the folder `writable`, and use /dev/null. All other access to files is denied,
    and so are TCP, signals to other processes and their abstract sockets. Files in `writable` can
    be neither removed nor renamed, so that its listing shows all that it holds. Paths that do not
    exist are skipped.

    `abi_version` is that of `landlock_abi()`. What older versions do not control (before 6 signals
    and abstract sockets, before 4 TCP, before 3 truncation), the seccomp filter must refuse. Raises
    `OSError` if `abi_version` is 0.
    """
    if abi_version == 0:
        raise OSError("this kernel has no Landlock, or does not allow its use (Linux 5.13 is the first with it)")
    handled_rights = (1 << _NUM_FILE_RIGHTS_BY_ABI[min(abi_version, 5)]) - 1
    rights_words = [handled_rights]
    if abi_version >= 4:
        rights_words.append(_ALL_TCP_RIGHTS)
    if abi_version >= 6:
        rights_words.append(_ALL_SCOPES)
    attributes = struct.pack(f"={len(rights_words)}Q", *rights_words)
    rules_fd = syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable:
        _add_path(rules_fd, path, _READ_RIGHTS)
    _add_path(rules_fd, "/dev/null", _READ_FILE | _WRITE_FILE)
    _add_path(rules_fd, writable, _WORK_FOLDER_RIGHTS & handled_rights)
    return rules_fd


def restrict(rules_fd: int) -> None:
    """Impose rules on this process and all that it starts, for good; `no_new_privs` must be set.
    Raises `OSError` if the kernel refuses it.
    """
    syscall(_RESTRICT_SELF, rules_fd, 0)


def _add_path(rules_fd: int, path: str, rights: int) -> None:
    try:
        path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed_rights = rights if os.path.isdir(path) else rights & _FILE_RIGHTS  # noqa: PTH112
        syscall(_ADD_RULE, rules_fd, _PATH_BENEATH, struct.pack("=Qi", allowed_rights, path_fd), 0)
    finally:
        os.close(path_fd)


MIB = 1 << 20


def confine(level: Level, limits: Limits, folder: str, rules_fd: int, parent_pid: int) -> None:
    """Confine this process for good at a level, in a new session and in the working folder. It must
    have only one thread.

    Args:
        folder: the working folder; from level `landlock` on the only place to write.
        rules_fd: the descriptor of Landlock's rules, used from level `landlock` on.
        parent_pid: the id of the process that forked this one. This one is killed when it ends, and
            exits at once if it has ended already.

    Raises `OSError` if the kernel refuses a barrier.
    """
    os.setsid()
    os.chdir(folder)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    if level.includes(Level.LIMITS):
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - in a child that lives for milliseconds
            address_space = int(file.read().split()[0]) * resource.getpagesize()
        for limit_id, limit in (
            (resource.RLIMIT_AS, address_space + limits.memory_mb * MIB),
            (resource.RLIMIT_FSIZE, limits.disk_mb * MIB),
            (resource.RLIMIT_NOFILE, limits.open_files),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            resource.setrlimit(limit_id, (limit, limit))
        # When memory runs short, the kernel should kill this process rather than a training.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - as above
            file.write("1000")
        # SIGXCPU at the soft limit shows the cause; at the hard limit the process is killed.
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    if level.includes(Level.LANDLOCK):
        restrict(rules_fd)
        os.close(rules_fd)
    if level.includes(Level.SECCOMP):
        install_filter()
