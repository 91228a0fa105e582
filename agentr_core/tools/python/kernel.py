"""Linux system calls that Python's library lacks."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Return the result of the system call with this number. Raises `OSError` with its errno."""
    return _checked(_libc().syscall(ctypes.c_long(number), *map(_word, arguments)), f"system call {number}")


def prctl(option: int, *arguments: int | bytes) -> None:
    """Set a property of this process, as in prctl(2). Raises `OSError`."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _checked(_libc().prctl(ctypes.c_int(option), *map(_word, padded)), f"prctl {option}")


def drop_privileges() -> None:
    """Give up all capabilities of this process for good: no program that it starts regains any,
    whoever owns the program. Raises `OSError`.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _word(value: int | bytes | None) -> ctypes.c_void_p | ctypes.c_char_p | ctypes.c_long:
    return ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_long(value or 0)


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
