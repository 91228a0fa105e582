"""The command line: `agentr`. It parses, calls one function of the flows or tasks, and prints.

Exit codes: 0 done, 1 our fault, 2 the user's mistake or what this machine refuses (one sentence on
stderr), 130 interrupted, 141 nobody reads the output any longer.

This module imports next to nothing, so that even an early interrupt is reported in one sentence.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.cli.group import PREFECT_DEFAULTS, cli

__all__ = ["PREFECT_DEFAULTS", "cli", "main"]

GO_ON = ("run", "collect", "improve", "compare", "eval", "headroom", "regrade")
"""Commands that continue where they were interrupted when they are run again."""
_LEAST_MEMORY = 2**29
"""The address space, in bytes, that is needed: with less, importing libraries ends the process."""


def main() -> None:
    """Run the command line and turn errors into one sentence and an exit code."""
    # SIGTERM is reported as Ctrl-C is. A shell starts background jobs with SIGINT ignored, and they
    # should go on ignoring it.
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    if refusal := _refusal():
        sys.stderr.write(f"agentr: {refusal}\n")
        sys.exit(2)
    from flows.cli.group import run

    run()


def interrupted() -> str:
    """Return the message of an interrupted command."""
    goes_on = sys.argv[1:2] and sys.argv[1] in GO_ON
    return f"interrupted{'; the same command goes on where it stopped' if goes_on else ''}"


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once, since nothing is under way yet: an exception raised while libraries
    are imported could be replaced by another one, or be lost.
    """
    os.write(2, f"{interrupted()}\n".encode())
    os._exit(130)


def _refusal() -> str:
    """Return why no command can work in this process, or the empty string."""
    strict = [option for option in sys.warnoptions if "error".startswith(option.split(":")[0].strip() or "-")]
    if strict:
        return (
            f"PYTHONWARNINGS or -W {strict[0]} makes errors of warnings, and the first one of a library would end a "
            "run; unset it"
        )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_MEMORY:
        return f"the limit on memory (`ulimit -v`) is {limit / 2**30:.1f} GiB, and libraries need more; raise it"
    return ""


def __getattr__(name: str) -> Any:
    """Import `cli` or `PREFECT_DEFAULTS` when it is first used, since that takes a while."""
    if name not in ("PREFECT_DEFAULTS", "cli"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flows.cli import group

    return getattr(group, name)
