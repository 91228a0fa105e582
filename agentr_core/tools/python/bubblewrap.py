"""Bubblewrap as an outer layer: a keeper in its own namespaces, if user namespaces are allowed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from agentr_core.lifetime import source_folder

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")


def wrapped(command: list[str], folder: str) -> list[str]:
    """Return a command that runs `command` in its own namespaces: without a network or other
    processes, and with access only to the system's programs, Python and this package (read-only)
    and to one folder (writable). Raises `FileNotFoundError` if bubblewrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("the program `bwrap` is not installed (package `bubblewrap`)")
    own = f"{source_folder()}/agentr_core"
    shown = dict.fromkeys((*_SYSTEM, sys.prefix, sys.base_prefix, str(Path(sys.executable).parent), own))
    reading = [word for path in shown for word in ("--ro-bind-try", path, path)]
    options = ["--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--bind", folder, folder]
    return [program, *reading, *options, "--", *command]
