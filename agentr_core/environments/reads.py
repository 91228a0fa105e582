"""Which files a world opens while it is played, as Python's audit events tell: what an environment
should name in `files_of`.

Events tell what Python opens, not what compiled code or another program reads.
"""

from __future__ import annotations

import inspect
import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentr_core.data_files import ROOTS
from agentr_core.environments import registry

_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64")
_CODE = (".py", ".pyc", ".so", ".pth")
_PROGRAMS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")


@dataclass(slots=True)
class Reads:
    """What was opened: files to be read, files to be written, programs, and addresses."""

    files: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Take note of an audit event."""
        if event == "open" and isinstance(args[0], str | bytes):
            path = str(Path(os.fsdecode(args[0])).absolute())
            (self.written if _writes(args[1], args[2]) else self.files).add(path)
        elif event == "sqlite3.connect" and isinstance(args[0], str | bytes):
            self.files.add(str(Path(os.fsdecode(args[0])).absolute()))
        elif event in _PROGRAMS and args[0]:
            self.programs.add(Path(os.fsdecode(args[0])).name)
        elif event == "socket.connect":
            where = args[1]
            self.addresses.add(":".join(map(str, where[:2])) if isinstance(where, tuple) else os.fsdecode(where))


def _writes(mode: Any, flags: int) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax")
    return flags & os.O_ACCMODE == os.O_WRONLY or bool(flags & os.O_CREAT)


_now: list[Reads] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for reads in _now:
        reads.note(event, args)


_hooked = False


@contextmanager
def listening(reads: Reads) -> Iterator[None]:
    """Note in `reads` what this process opens during the block, in any of its threads."""
    global _hooked
    if not _hooked:
        # A hook stays for as long as the process lives, so only a process that asks gets it.
        sys.addaudithook(_hook)
        _hooked = True
    _now.append(reads)
    try:
        yield
    finally:
        _now.remove(reads)


def unseen(name: str, options: Mapping[str, Any], variables: Mapping[str, str], reads: Reads) -> list[str]:
    """Return in sentences what of an environment's reads is no part of a run's id: files that it
    does not name in `files_of`; where it names none, also programs and addresses.

    Left out are what belongs to Python, to installed packages or to the system, temporary files,
    and a folder that an option `cache_dir` names.
    """
    kind = registry.checked(name, options)
    named = registry.files_of(name, options, variables).values()
    known = [Path(path).resolve() for path in (*named, *_elsewhere(kind, options))]
    paths = (Path(path).resolve() for path in sorted(reads.files - reads.written))
    files = [
        path
        for path in paths
        if path.is_file() and path.suffix not in _CODE and not any(path.is_relative_to(place) for place in known)
    ]
    found = []
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        found.append(
            f"it read {files[0]}{more}, which files_of does not name: with another content there, a run would go on"
        )
    if not hasattr(kind, "files_of"):
        found += [
            f"it {what} {', '.join(sorted(names))}, and what is read there cannot be seen"
            for what, names in (("started", reads.programs), ("asked", reads.addresses))
            if names
        ]
    return found


def _elsewhere(kind: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the places whose files are not the user's."""
    yield from (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), site.getusersitepackages())
    yield from (*_SYSTEM, tempfile.gettempdir(), *map(str, ROOTS))
    for module in list(sys.modules.values()):
        # Editable packages lie where their authors work. One without __init__ may be any folder.
        places = getattr(module, "__path__", None)
        if getattr(module, "__file__", None) and isinstance(places, list):
            yield from places
    parameter = inspect.signature(kind).parameters.get("cache_dir")
    if parameter is not None:
        yield str(options.get("cache_dir") or parameter.default)
