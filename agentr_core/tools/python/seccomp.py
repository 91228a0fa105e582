"""seccomp-BPF: a permanent filter in front of every system call of a process (seccomp(2)).

The filter lists what is allowed. Everything else is refused with "not permitted", so that code gets
a `PermissionError` instead of being killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from agentr_core.tools.python import kernel
from agentr_core.tools.python.syscalls import numbers

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
_UNKNOWN = 0x00050000 | errno.ENOSYS
_WORD = 0xFFFFFFFF

_CLONE_THREAD = 0x00010000
_NEW_NAMESPACES = 0x7E020000
_HIDDEN_FILE = 0o20000000
"""The bit of O_TMPFILE, which makes a file that no folder lists."""
_OPENING = _HIDDEN_FILE | os.O_TRUNC | os.O_ACCMODE
_OPENED = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
"""Flags with which a file may be opened. Before ABI 3, Landlock lets readable files be
truncated.
"""
_THREAD_NAMES = (15, 16, 0x53564D41)
"""The allowed options of prctl: PR_SET_NAME, PR_GET_NAME, PR_SET_VMA."""
_TERMINALS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The allowed requests of ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_DESCRIPTORS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""The allowed commands of fcntl: duplicate, flags, locks; not F_SETOWN, which can send signals to
others.
"""


@dataclass(frozen=True)
class _Condition:
    """A condition on a call: one argument, under a mask, must be one of some values."""

    argument: int
    values: tuple[int, ...]
    mask: int = _WORD


def install() -> None:
    """Install the filter in this process, which must have one thread and `no_new_privs`. Raises
    `OSError`.
    """
    _lay(_program(os.uname().machine, os.getpid()))


def _lay(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a count, padding, a pointer.
    kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))


def _program(machine: str, process: int) -> bytes:
    """Return the filter for a process, eight bytes for each instruction."""
    known = dict(numbers(machine))
    lines = [_line(_LOAD, _ARCH_AT), _line(_EQUAL, _AUDIT_ARCH[machine], 1, 0), _line(_RETURN, _KILL)]
    lines.append(_line(_LOAD, _NUMBER_AT))
    # Without clone3, glibc makes threads with `clone`, whose flags a filter can read.
    lines += _answer(known.pop("clone3"), _UNKNOWN)
    for name, condition in _conditions(process).items():
        if name in known:
            lines += _under(known.pop(name), condition)
    for number in known.values():
        lines += _answer(number, _ALLOW)
    return b"".join([*lines, _line(_RETURN, _REFUSE)])


def _conditions(process: int) -> dict[str, _Condition]:
    return {
        "clone": _Condition(0, (_CLONE_THREAD,), _CLONE_THREAD | _NEW_NAMESPACES),
        "kill": _Condition(0, (process,)),
        "tgkill": _Condition(0, (process,)),
        "prlimit64": _Condition(0, (0, process)),
        "prctl": _Condition(0, _THREAD_NAMES),
        "ioctl": _Condition(1, _TERMINALS),
        "fcntl": _Condition(1, _DESCRIPTORS),
        "open": _Condition(1, _OPENED, _OPENING),
        "openat": _Condition(2, _OPENED, _OPENING),
    }


def _answer(number: int, action: int) -> Iterable[bytes]:
    return _line(_EQUAL, number, 0, 1), _line(_RETURN, action)


def _under(number: int, condition: _Condition) -> Iterable[bytes]:
    checks = [line for value in condition.values for line in _answer(value, _ALLOW)]
    body = [
        _line(_LOAD, _ARGUMENTS_AT + 8 * condition.argument),
        _line(_AND, condition.mask),
        *checks,
        _line(_RETURN, _REFUSE),
    ]
    return _line(_EQUAL, number, 0, len(body)), *body


def _line(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, constant)
