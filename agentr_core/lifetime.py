"""The end of a child process with the one that started it, however that one ended."""

from __future__ import annotations

import os
import sys
import threading


def end_with_parent() -> None:
    """Make this process end as soon as the far end of its standard input is closed."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Past Python's own buffer, whose lock a thread must not hold when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
