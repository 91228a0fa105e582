"""Helpers for our child processes: the location of the package, faster imports, an end together
with the parent process, and folders that do not outlive it for long.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_YOUNG_SECONDS = 60.0
"""A folder of this age may be one that is not held yet."""


def python_path() -> str:
    """Return PYTHONPATH for a child process that imports this very package."""
    return os.pathsep.join(filter(None, (source_folder(), os.environ.get("PYTHONPATH"))))


def source_folder() -> str:
    """Return the folder that contains this very package."""
    return str(Path(__file__).resolve().parents[1])


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection while the body imports, and exempt what it imported for good.

    Torch, Transformers and TRL make millions of objects that stay: scanning them again and again
    takes a fifth of their import time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


class Scratch:
    """A temporary folder that is removed by `close`, or when this process ends.

    If the process is killed, the next one that makes a folder of the same name removes it: a folder
    that nobody holds a lock on is nobody's.
    """

    def __init__(self, name: str) -> None:
        prefix = f"agentr-{name}-"
        _remove_forsaken(prefix)
        self.path = tempfile.mkdtemp(prefix=prefix)
        held = os.open(self.path, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        self._close = weakref.finalize(self, _remove, self.path, held, os.getpid())

    def close(self) -> None:
        """Remove the folder. Calling it twice is harmless."""
        self._close()


def _remove(path: str, held: int, process: int) -> None:
    os.close(held)
    # Not at the exit of a process forked from this one, whose children still use the folder.
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def _remove_forsaken(prefix: str) -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue
            found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(found)


def end_with_parent() -> None:
    """Make this process end as soon as the far end of its standard input is closed."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Reads past Python's own buffer: a thread must not hold its lock when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
