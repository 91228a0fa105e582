"""Runs a program and ends it, with all its children, as soon as standard input ends: then whoever
wanted it is gone.

`python models/vllm/guard.py COMMAND...`, with nothing but the standard library. The program does
not hear of a Ctrl-C at the terminal; its end is ordered by the end of the input, or by SIGTERM to
this guard.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE = 10.0
"""Seconds for an orderly end before the program is killed."""
_SET_PARENT_DEATH_SIGNAL = 1


def main(command: list[str]) -> int:
    """Return the program's exit status, 128 + the signal if one ended it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_guard)
    signal.signal(signal.SIGTERM, lambda *_: _in_background(_end, child.pid))
    _in_background(_end_with_input, child.pid)
    status = child.wait()
    _signal(child.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_input(group: int) -> None:
    # Past Python's own buffer, whose lock a thread must not hold when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    _end(group)


def _end(group: int) -> None:
    _signal(group, signal.SIGTERM)
    time.sleep(GRACE)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _in_background(function, *arguments) -> None:  # type: ignore[no-untyped-def]
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _end_with_guard() -> None:
    # Should the guard itself be killed.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
