"""Run a program and end it, with all its descendants, as soon as standard input ends: that means
that the process which started this guard is gone.

`python agentr_core/guard.py COMMAND...` uses only the standard library. The program does not
receive a Ctrl-C at the terminal; it is ended by the end of the input, or by SIGTERM to this guard.
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
from pathlib import Path

GRACE = 10.0
"""Seconds for an orderly exit before the program is killed."""
NOT_STARTED = 127
"""The exit status if the program cannot be started, as in a shell."""
# This signal alone is not enough: it is sent when the parent's thread ends, and stages start
# servers from threads.
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the program; return its exit status, 128 + the signal that ended it, or `NOT_STARTED`."""
    # What the program starts in sessions of their own, as coding agents do with each command of a
    # shell, becomes a child of this process when its parent ends.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_guard)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return NOT_STARTED
    signal.signal(signal.SIGTERM, lambda *_: _in_background(_end, child.pid))
    _in_background(_end_with_input, child.pid)
    status = child.wait()
    _signal(child.pid, signal.SIGKILL)
    # Kill what is left of the program: children, then theirs, until there are none.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(FileNotFoundError, ChildProcessError):
        while orphans := children.read_text().split():
            for orphan in orphans:
                with suppress(ProcessLookupError):
                    os.kill(int(orphan), signal.SIGKILL)
            os.waitpid(-1, 0)
    return status if status >= 0 else 128 - status


def _end_with_input(group: int) -> None:
    # This bypasses Python's own buffer, whose lock a thread must not hold when the interpreter
    # exits.
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
    # In case the guard itself is killed.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
