"""What child processes of ours need: where the package is, imports that take no longer than they
must, and an end with the process that started them.
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
    """Return the folder that this very package lies in."""
    return str(Path(__file__).resolve().parents[1])


@contextmanager
def importing() -> Iterator[None]:
    """Hold back the garbage collector while the body imports, for good from what it imported.

    Torch, Transformers and TRL make millions of objects that stay: to look through them again and
    again takes a fifth of the time of their imports.
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
    # Past Python's own buffer, whose lock a thread must not hold when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
