"""Show the progress of commands that are not runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from agentr_core.reports import wording

_EVERY_S = 10.0
_REDRAWN_S = 0.1


def progress_printer() -> Callable[[int, int, str], None]:
    """Return a function `show(done, total, note)` that shows these on standard error, with the
    elapsed and the remaining time: on a terminal in one line that is redrawn, else in a new line
    every ten seconds.
    """
    began = time.monotonic()
    begun_with, last, total_before = 0, began, 0

    def show(done: int, total: int, note: str) -> None:
        nonlocal began, begun_with, last, total_before
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if total != total_before:
            # Other work begins, for which the pace so far tells nothing.
            began, begun_with, total_before = now, done, total
        seconds, new = now - began, done - begun_with
        if done < total and now - last < (_REDRAWN_S if terminal else _EVERY_S):
            return
        if not terminal and now - last < _EVERY_S:
            return
        last = now
        times = wording.duration(seconds)
        if new > 0 and done < total:
            times += f", {wording.duration(seconds * (total - done) / new)} left"
        line = f"{done:,} of {total:,} {note}, {times}"
        click.echo(f"\r\033[K{line}" if terminal else line, err=True, nl=not terminal or done == total)

    return show
