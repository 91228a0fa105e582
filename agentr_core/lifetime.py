"""Helpers for our child processes: the location of the package, faster imports, and an end together
with the parent process.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def end_with_parent() -> None:
    """Make this process end as soon as the far end of its standard input is closed."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Reads past Python's own buffer: a thread must not hold its lock when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
