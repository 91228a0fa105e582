"""How a stage reports progress: a bar on a terminal, plain lines in a log, a progress artifact in
Prefect's UI.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from agentr_core.runtime import live
from agentr_core.runtime.equipment import Progress
from agentr_core.runtime.remaining import Remaining

console: ContextVar[Console | None] = ContextVar("agentr_console", default=None)
"""Where a local run shows its progress; without one, lines go to the logger of the Prefect run."""

_LINE_EVERY_S = 10.0
_ARTIFACT_EVERY_S = 5.0
_LIVE_EVERY_S = 1.0
_MIN_COLUMNS_FOR_LONG_BAR = 120
"""The columns that a terminal must have for the longer bar."""
_SILENCE_S = 60.0
"""After so many seconds without a report, a line says so: a log shows whether a run waits or hangs.
"""


def print_line(line: str) -> None:
    """Print a line on the console of a local run; without one, write it to the log of the Prefect
    run.
    """
    target = console.get()
    if target is None:
        _logger()(line)
    else:
        target.print(line, highlight=False, soft_wrap=True)


class WarningPrinter(logging.Handler):
    """A handler that prints the library's warnings, from any thread, on a console: Prefect's own
    handlers are silent in a local run.
    """

    def __init__(self, target: Console) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning."""
        self._target.print(record.getMessage(), highlight=False, soft_wrap=True, markup=False)


@asynccontextmanager
async def stage_progress(
    stage: str, iteration: int, estimate: Remaining, *, file: Path | None = None
) -> AsyncIterator[Progress]:
    """Yield a function that reports the progress of one stage and can be called from any thread, as
    `report(done, total, note)`; the last report is always shown.

    Args:
        estimate: how long the stage and the rest of the run are expected to take.
        file: where to write the progress every second, for the viewer; None: nowhere.
    """
    name = f"iteration {iteration}  {stage}" if iteration else f"base model   {stage}"
    target = console.get()
    artifact = _Artifact(f"{stage}-{iteration}", active=TaskRunContext.get() is not None)
    time_estimate = _TimeEstimate(estimate)
    if target is not None and target.is_terminal:
        display = _bar(target, name, time_estimate)
    else:
        write_line = _logger() if target is None else partial(target.print, highlight=False, soft_wrap=True)
        display = _lines(write_line, name, time_estimate)
    run = _run.get()
    started_at, last_report = time.time(), (0, 0, "")

    async def write_live_progress(file: Path) -> None:
        while True:
            done, total, note = last_report
            stage_left, run_left = time_estimate.seconds_left(done, total)
            live.write_progress(
                file,
                live.StageProgress(
                    iteration=iteration,
                    stage=stage,
                    done=done,
                    total=total,
                    note=note,
                    began=started_at,
                    told=time.time(),
                    stage_left=stage_left,
                    run_left=run_left,
                ),
            )
            await asyncio.sleep(_LIVE_EVERY_S)

    live_task = None if file is None else asyncio.create_task(write_live_progress(file))
    async with display as draw:

        def report(done: int, total: int, note: str) -> None:
            nonlocal last_report
            draw(done, total, note)
            artifact.update(done, total)
            last_report = done, total, note
            if run is not None:
                run.update(done, total)

        try:
            yield report
        finally:
            if live_task is not None:
                live_task.cancel()
    await artifact.finish()
    if run is not None:
        run.finish_stage()


@asynccontextmanager
async def run_progress(name: str, num_stages: int) -> AsyncIterator[None]:
    """Show the stages of the block as one progress artifact of the flow run: how many of all
    `num_stages` are finished, and which share of the current one is done.
    """
    run = _RunProgress(_Artifact(name, active=FlowRunContext.get() is not None), num_stages)
    await run.artifact.begin()
    context_token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(context_token)
    await run.artifact.finish()


@dataclass(slots=True)
class _RunProgress:
    artifact: _Artifact
    num_stages: int
    num_finished: int = 0

    def update(self, done: int, total: int) -> None:
        """Show the finished stages and the share `done / total` of the current one, in thousandths
        of a stage.
        """
        share = min(1.0, done / total) if total else 0.0
        self.artifact.update(round(1000 * (self.num_finished + share)), 1000 * max(1, self.num_stages))

    def finish_stage(self) -> None:
        """Count the current stage as finished."""
        self.num_finished += 1
        self.update(0, 0)


_run: ContextVar[_RunProgress | None] = ContextVar("agentr_run", default=None)
"""The `run_progress` block that encloses this context, if any."""


@dataclass(slots=True)
class _TimeEstimate:
    """Estimates how much time a stage and its run still take."""

    expected: Remaining
    started_at: float = field(default_factory=time.monotonic)
    num_done_at_start: int | None = None
    """The units that were already done when the stage first reported, as in a resumed stage."""
    last_done: tuple[int, float] = (0, 0.0)
    """How many units are done, and after how many seconds of the stage the last one was."""

    def elapsed(self) -> float:
        """Return the seconds since the stage began in this process."""
        return time.monotonic() - self.started_at

    def seconds_left(self, done: int, total: int) -> tuple[float | None, float | None]:
        """Return the seconds that are left of the stage and of the run, None where not known."""
        self.num_done_at_start = done if self.num_done_at_start is None else min(self.num_done_at_start, done)
        if done != self.last_done[0]:
            self.last_done = done, self.elapsed()
        return self.expected.seconds_left(
            self.elapsed(), self.last_done[1], done - self.num_done_at_start, total - self.num_done_at_start
        )


@asynccontextmanager
async def _bar(target: Console, name: str, time_estimate: _TimeEstimate) -> AsyncIterator[Progress]:
    """Yield a function that draws a bar on a terminal. On a narrow one the note is cut, so that
    name, count and times are always complete.
    """

    def times(task: Task) -> str:
        stage, run = map(_clock, time_estimate.seconds_left(int(task.completed), int(task.total or 0)))
        over = task.finished or not stage
        return f"{_clock(time_estimate.elapsed())}{'' if over else f'<{stage}'}{f' run<{run}' if run else ''}"

    def count(task: Task) -> str:
        return "" if task.total is None else f"{int(task.completed)}/{int(task.total)}"

    def note(task: Task) -> str:
        return escape(str(task.fields["note"]))

    columns = (
        _Text(lambda task: escape(task.description)),
        BarColumn(bar_width=20 if target.width >= _MIN_COLUMNS_FOR_LONG_BAR else 8),
        _Text(count),
        _Text(times),
        _Text(note, Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Bars(*columns, console=target, expand=True) as bars:
        bar = bars.add_task(name, total=None, note="")

        def draw(done: int, total: int, note: str) -> None:
            bars.update(bar, completed=done, total=total, note=note)

        yield draw


class _Text(TextColumn):
    """A column whose text is computed from the task."""

    def __init__(self, text: Callable[[Task], str], column: Column | None = None) -> None:
        super().__init__("", table_column=column or Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        """Return the current text for a task."""
        return Text.from_markup(self._text(task))


@asynccontextmanager
async def _lines(
    write_line: Callable[[str], object], name: str, time_estimate: _TimeEstimate
) -> AsyncIterator[Progress]:
    """Yield a function that writes a line at most every 10 seconds. After each minute without a
    report a line says so, and at the end one gives the time that the stage took.
    """
    last_line, written_at, reported_at = name, time_estimate.started_at, time_estimate.started_at

    def report(done: int, total: int, note: str) -> None:
        nonlocal last_line, written_at, reported_at
        last_line, reported_at = f"{name}: {done}/{total} {note}".rstrip(), time.monotonic()
        stage, run = map(_clock, time_estimate.seconds_left(done, total))
        if reported_at - written_at >= _LINE_EVERY_S:
            written_at = reported_at
            remaining_times = [
                *([f"{stage} left"] if stage and done < total else []),
                *([f"{run} of the run"] if run else []),
            ]
            write_line("; ".join([last_line, *([", ".join(remaining_times)] if remaining_times else [])]))

    async def remind() -> None:
        while True:
            await asyncio.sleep(_SILENCE_S)
            if (silent_seconds := time.monotonic() - reported_at) >= _SILENCE_S:
                write_line(f"{last_line}; nothing new for {silent_seconds:.0f} s")

    reminder = asyncio.create_task(remind())
    try:
        yield report
    finally:
        reminder.cancel()
    write_line(f"{last_line} in {time_estimate.elapsed():.1f} s")


def _clock(seconds: float | None) -> str:
    """Return a time as minutes and seconds, or as hours, minutes and seconds; empty for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Artifact:
    """A progress artifact of the current task run or flow run. Updates are sent in the background,
    and only if it is active: outside of a Prefect run there is nothing to attach it to.
    """

    def __init__(self, description: str, *, active: bool) -> None:
        self._description = description
        self._loop = asyncio.get_running_loop()
        self._active = active
        self._id: UUID | None = None
        self._sent_at = time.monotonic()
        self._done = 0.0
        self._pending_update: Future[None] | None = None

    def update(self, done: int, total: int) -> None:
        """Send the share that is done, unless an update was sent within the last five seconds. The
        first update creates the artifact.
        """
        self._done = 100.0 * done / total if total else 0.0
        busy = self._pending_update is not None and not self._pending_update.done()
        if self._active and not busy and time.monotonic() - self._sent_at >= _ARTIFACT_EVERY_S:
            self._sent_at = time.monotonic()
            self._pending_update = asyncio.run_coroutine_threadsafe(self._send(), self._loop)

    async def begin(self) -> None:
        """Create the artifact now, so that it belongs to the current run and not to the task run
        that sends the first update.
        """
        if self._active:
            await self._send()

    async def finish(self) -> None:
        """Set the artifact to 100%, if the stage took long enough to have one."""
        if self._pending_update is not None:
            await asyncio.wrap_future(self._pending_update)
        if self._id is not None:
            self._done = 100.0
            await self._send()

    async def _send(self) -> None:
        if self._id is None:
            self._id = await acreate_progress_artifact(progress=self._done, description=self._description)
        else:
            await aupdate_progress_artifact(artifact_id=self._id, progress=self._done)


def _logger() -> Callable[[str], None]:
    if TaskRunContext.get() is None and FlowRunContext.get() is None:
        return logging.getLogger("agentr").info
    return get_run_logger().info
