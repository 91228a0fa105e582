"""Landlock: the kernel's rules on files, TCP, signals and abstract sockets, which a process imposes
on itself (landlock(7)).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from agentr_core.tools.python import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_MAKE_REG = 1 << 8
_TRUNCATE = 1 << 14
_FILE_RIGHTS_KNOWN = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""The number of file rights by ABI: from execution up to links between folders (2), truncation (3)
and ioctl on devices (5).
"""
_ALL_TCP_RIGHTS = 0b11
"""From ABI 4 on: bind and connect."""
_ALL_SCOPES = 0b11
"""From ABI 6 on: abstract sockets and signals do not reach outside."""

_READ = _READ_FILE | _READ_DIR
_KEEP_FILES = _READ | _WRITE_FILE | _TRUNCATE | _MAKE_REG
_FILE_ALONE = _READ_FILE | _WRITE_FILE | _TRUNCATE


def abi() -> int:
    """Return the version of Landlock in this kernel; 0 if there is none."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def ruleset(readable: Iterable[str], writable: str, version: int) -> int:
    """Return the descriptor of rules for `restrict`: a process may read everything under some
    paths, keep plain files in one folder and use /dev/null, and may do nothing else with files or
    TCP, or with signals to other processes and their abstract sockets.

    Files in `writable` can be made and changed, but not removed or renamed, so that its listing
    shows everything it holds. Paths that do not exist are left out. What older ABIs do not control
    (before 6 signals and abstract sockets, before 4 TCP, before 3 truncation), the filter of system
    calls must refuse. Raises `OSError` without Landlock.
    """
    if version == 0:
        raise OSError("this kernel has no Landlock, or does not allow its use (Linux 5.13 is the first with it)")
    handled = (1 << _FILE_RIGHTS_KNOWN[min(version, 5)]) - 1
    made = _empty_ruleset(handled, version)
    for path in readable:
        _allow(made, path, _READ)
    _allow(made, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(made, writable, _KEEP_FILES & handled)
    return made


def restrict(rules: int) -> None:
    """Impose rules on this process and all that it starts, for good; needs `no_new_privs`. Raises
    `OSError`.
    """
    kernel.syscall(_RESTRICT_SELF, rules, 0)


def _empty_ruleset(file_rights: int, version: int) -> int:
    words = [file_rights]
    if version >= 4:
        words.append(_ALL_TCP_RIGHTS)
    if version >= 6:
        words.append(_ALL_SCOPES)
    attributes = struct.pack(f"={len(words)}Q", *words)
    return kernel.syscall(_CREATE_RULESET, attributes, len(attributes), 0)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & _FILE_ALONE  # noqa: PTH112
        kernel.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, file), 0)
    finally:
        os.close(file)
