"""The leaderboard: a Markdown table, between two marks of a file, of the last scores of runs and of
scores from papers. Its entries are JSON lines in a file of the same name beside it.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentr_core.errors import ConfigError, DiskError
from agentr_core.reports import wording
from agentr_core.reports.document import Column, Estimate, IterationReport, Row, Table
from agentr_core.reports.markdown import table_markdown
from agentr_core.system import write_text

START_MARK, END_MARK = "<!-- leaderboard -->", "<!-- /leaderboard -->"
_CORES_PATTERN = re.compile(r", (\d+) of \d+$")

Share = Annotated[float, Field(ge=0, le=1)]


class Entry(BaseModel):
    """A model's score on the held-out instances of a world. `interval` and `gain_interval` are 95%
    intervals; `gain` is the difference of success to the base model on the same episodes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    world: str
    recipe: str
    """Name of the recipe, or of the method of a paper."""
    model: str
    measure: Literal["success", "reward"] = "success"
    score: Share
    interval: tuple[Share, Share] | None = None
    base: Share | None = None
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    episodes: int | None = None
    iteration: int | None = None
    seed: int | None = None
    commit: str = ""
    date: str = ""
    core_hours: float | None = None
    """Wall-clock hours of the run's stages times the processors that it could use."""
    machine: str = ""
    run: str = ""
    """Id of the run; empty for a number of a paper."""
    source: str = ""
    """The paper, and the place in it, that has the number; empty for a run."""


def entry_of(report: IterationReport, *, seed: int, seconds: float) -> Entry:
    """Return the entry of a run from the report of its last iteration; `seconds` is what all of its
    stages took. Raises `ConfigError` if no model was evaluated to the end.
    """
    if not report.scores:
        raise ConfigError(f"run {report.run_id} has no evaluated model yet, so it has no place on a leaderboard")
    last_score, base_score = report.scores[-1], report.score(0)
    processor = report.versions.get("processor", "")
    cores_match = _CORES_PATTERN.search(processor)
    machine = ", ".join(filter(None, [processor, report.versions.get("gpu", "")]))
    gain = last_score.versus_base
    return Entry(
        world=report.environment,
        recipe=report.recipe_name,
        model=report.model,
        score=last_score.success.value,
        interval=_rounded_interval(last_score.success),
        base=base_score.success.value if base_score else None,
        gain=gain.value if gain else None,
        gain_interval=_rounded_interval(gain) if gain else None,
        episodes=last_score.success.n,
        iteration=last_score.iteration,
        seed=seed,
        commit=report.versions.get("commit", ""),
        date=report.date.split()[0],
        core_hours=round(seconds / 3600 * int(cores_match[1]), 2) if cores_match else None,
        machine=machine,
        run=report.run_id,
    )


def add_entry(page: Path, entry: Entry | None = None) -> Table:
    """Add an entry to the leaderboard of a Markdown file, in place of an older entry of the same
    run, and return the whole table; without an entry, write the table anew. A missing file is
    created; in an existing one, only the text between the marks changes.

    Raises:
        ConfigError: the file has text and no marks, or the entries beside it cannot be read.
        DiskError: it cannot be written.
    """
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        folder_fd = os.open(page.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DiskError(f"{page.parent} cannot be opened: {error.strerror}") from error
    try:
        # Without the lock, one of two runs that end at the same time would overwrite the other's
        # entry.
        fcntl.flock(folder_fd, fcntl.LOCK_EX)
        entries_file = page.with_suffix(".jsonl")
        entries = [row for row in read_entries(entries_file) if entry is None or not row.run or row.run != entry.run]
        if entry is not None:
            entries.append(entry)
        board = leaderboard_table(entries)
        text = page.read_text(encoding="utf-8") if page.exists() else f"# Leaderboard\n\n{START_MARK}\n{END_MARK}\n"
        head, start_mark, after_start = text.partition(START_MARK)
        _, end_mark, tail = after_start.partition(END_MARK)
        if not (start_mark and end_mark):
            raise ConfigError(
                f"{page} has no place for a leaderboard; put the lines {START_MARK} and {END_MARK} where it shall be"
            )
        # The entries first, since the page can be rebuilt from them.
        write_text(entries_file, "".join(f"{row.model_dump_json(exclude_defaults=True)}\n" for row in entries))
        write_text(page, f"{head}{START_MARK}\n\n{table_markdown(board)}\n{END_MARK}{tail}")
        return board
    finally:
        os.close(folder_fd)


def read_entries(file: Path) -> list[Entry]:
    """Return the entries of a JSON lines file; none if there is no file. Raises `ConfigError` for a
    malformed line.
    """
    entries = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
        try:
            entries.append(Entry.model_validate_json(line))
        except ValidationError as error:
            first_error = error.errors()[0]
            location = ".".join(map(str, first_error["loc"])) or "line"
            raise ConfigError(f"{file}, line {number}: {location}: {first_error['msg']}") from None
    return entries


def leaderboard_table(entries: Sequence[Entry]) -> Table:
    """Return the leaderboard, sorted by world, measure and falling score; entries of papers are
    marked `theirs`.
    """
    columns = (
        Column("World", "text"),
        Column("Recipe", "text"),
        Column("Model", "text"),
        Column("Base"),
        Column("Score (95% interval)"),
        Column("Gain (95% interval)"),
        Column("Episodes"),
        Column("Seed"),
        Column("Core hours"),
        Column("Commit, date", "text"),
    )
    sorted_entries = sorted(
        entries, key=lambda entry: (entry.world, entry.measure, -entry.score, entry.recipe, entry.seed or 0)
    )
    return Table(columns, tuple(map(_row, sorted_entries)))


def _row(entry: Entry) -> Row:
    unit = "" if entry.measure == "success" else f" reward {wording.TIMES}100"
    gain = wording.NOTHING if entry.gain is None else wording.points(entry.gain)
    if entry.gain_interval:
        gain += f" ({wording.points(entry.gain_interval[0])} to {wording.points(entry.gain_interval[1])})"
    score = f"{wording.percent(entry.score)}{unit}"
    if entry.interval:
        score += f" ({wording.percent(entry.interval[0])}{wording.DASH}{wording.percent(entry.interval[1])})"
    origin = " ".join(filter(None, [entry.commit[:8], entry.date])) if entry.run else f"theirs: {entry.source}"
    numbers = (entry.episodes, entry.seed)
    return Row(
        (
            entry.world,
            entry.recipe,
            entry.model,
            wording.percent(entry.base),
            score,
            gain,
            *(wording.NOTHING if number is None else wording.count(number) for number in numbers),
            wording.decimal(entry.core_hours, 1),
            origin,
        )
    )


def _rounded_interval(estimate: Estimate) -> tuple[float, float]:
    return round(estimate.low, 4), round(estimate.high, 4)
