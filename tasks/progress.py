"""How a stage shows that it moves: a bar on a terminal, plain lines in a log, a progress artifact in Prefect's UI."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Update = Callable[[int, int, str], None]
"""Called with (done, total, note) by a stage as it goes on."""

console: ContextVar[Console | None] = ContextVar("agentr_console", default=None)
"""Where a local run shows its progress; without one, lines go to the logger of the Prefect run."""

_LINE_EVERY_S = 10.0
_ARTIFACT_EVERY_S = 5.0


@contextmanager
def stage_progress(stage: str, iteration: int) -> Iterator[Update]:
    """Return a function to report progress of one stage with; the last report is shown in any case."""
    name = f"iteration {iteration}  {stage}" if iteration else f"base model   {stage}"
    target = console.get()
    artifact = _Artifact(f"{stage}-{iteration}")
    started = time.monotonic()
    if target is not None and target.is_terminal:
        columns = (
            TextColumn("{task.description:<28}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with Progress(*columns, console=target) as bars:
            bar = bars.add_task(name, total=None, note="")

            def draw(done: int, total: int, note: str) -> None:
                bars.update(bar, completed=done, total=total, note=note)
                artifact.update(done, total)

            yield draw
        artifact.finish()
        return
    say = _logger() if target is None else (lambda text: target.print(text, highlight=False))
    last = _Last()

    def line(done: int, total: int, note: str) -> None:
        last.text = f"{name}: {done}/{total} {note}".rstrip()
        if time.monotonic() - last.at >= _LINE_EVERY_S:
            last.at = time.monotonic()
            say(last.text)
        artifact.update(done, total)

    yield line
    say(f"{last.text or name} in {time.monotonic() - started:.1f} s")
    artifact.finish()


class _Last:
    def __init__(self) -> None:
        self.text = ""
        self.at = time.monotonic()


class _Artifact:
    """A progress artifact of the present task run, if there is one."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._id: UUID | None = None
        self._at = 0.0
        self._done = 0.0

    def update(self, done: int, total: int) -> None:
        """Set the artifact to the share that is done, at most every few seconds."""
        self._done = 100.0 * done / total if total else 0.0
        if time.monotonic() - self._at < _ARTIFACT_EVERY_S or TaskRunContext.get() is None:
            return
        self._at = time.monotonic()
        self._put()

    def finish(self) -> None:
        """Set the artifact to all done."""
        if self._id is not None:
            self._done = 100.0
            self._put()

    def _put(self) -> None:
        if self._id is None:
            identifier = create_progress_artifact(progress=self._done, description=self._description)
            self._id = identifier if isinstance(identifier, UUID) else None
        else:
            update_progress_artifact(artifact_id=self._id, progress=self._done)


def _logger() -> Callable[[str], None]:
    if TaskRunContext.get() is None:
        return logging.getLogger("agentr").info
    return get_run_logger().info
