"""Runs side by side: the last model of each on the same held-out episodes, and its cost."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.reports import addresses, wording
from agentr_core.reports.document import Cell, Column, Link, Paragraph, Row, Section, Table, Whisker
from agentr_core.reports.records import Estimate, IterationScore
from agentr_core.reports.run_page import curves, of_sets
from agentr_core.reports.score_tables import gain


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScore:
    """The score of the model of a run on a set, paired with the first run's on the same episodes.

    `difference` is None for the first run, and if no episode is shared; `won` and `lost` count the
    shared episodes that only one of the two solved.
    """

    name: str
    success: Estimate
    difference: Estimate | None = None
    shared: int = 0
    won: int = 0
    lost: int = 0
    depths: tuple[tuple[int, Estimate], ...] = ()
    """The difference by difficulty class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumn:
    """One run of a comparison. `iteration` is the one whose model is compared; times are in
    seconds.
    """

    run_id: str
    recipe_name: str
    method: str
    model: str
    seed: int
    iteration: int
    scores: tuple[IterationScore, ...]
    sets: tuple[PairedScore, ...]
    seconds: float
    prompt: int
    completion: int
    trained: int
    differs: tuple[str, ...] = ()
    """The sections of its recipe that differ from those of the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsReport:
    """Two or more runs; differences are relative to the first."""

    runs: tuple[RunColumn, ...]
    date: str
    viewer: str = ""


def sections(report: RunsReport) -> tuple[Section, ...]:
    """Return the sections of the page: the runs, success side by side, by depth, curves, cost."""
    return (
        _heads(report),
        Section("paired", _PAIRED, (paired_table(report), *_unshared(report)), _NOTE),
        *_depths(report),
        curves("Success by iteration", _lines(report)),
        _costs(report),
    )


_PAIRED = "Success, and differences on the same episodes"
_NOTE = (
    "The model that each run ends with. Differences to the first run are in points, paired by episode (same instance "
    "and number and, in a revision test, the same replayed steps) with 95% intervals, clustered where several "
    "instances are one under different names. Won: episodes that this run solved and the first did not; lost: the "
    "other way round."
)


def label(report: RunsReport, place: int) -> str:
    """Return the label of a run: its recipe, and its id if other runs have the same recipe."""
    run = report.runs[place]
    alike = sum(one.recipe_name == run.recipe_name for one in report.runs) > 1
    return f"{run.recipe_name} {run.run_id[:6]}" if alike else run.recipe_name


def paired_table(report: RunsReport) -> Table:
    """Return a row for each set and run."""
    columns = (
        Column("Set", "text"),
        Column("Run", "text"),
        Column("Success %"),
        Column("", "whisker"),
        Column("Against the first"),
        Column("Won"),
        Column("Lost"),
        Column("Shared episodes"),
    )
    names = tuple(dict.fromkeys(one.name for run in report.runs for one in run.sets))
    rows = [
        Row((name, label(report, place), *_paired(one, first=not place)))
        for name in names
        for place, run in enumerate(report.runs)
        for one in run.sets
        if one.name == name
    ]
    return Table(columns, tuple(rows))


def _paired(one: PairedScore, *, first: bool) -> tuple[Cell, ...]:
    value = one.success
    own = (wording.measured(value), Whisker(value.low, value.value, value.high))
    if first:
        return (*own, *(wording.NOTHING,) * 3, wording.count(value.n))
    return (
        *own,
        gain(one.difference),
        wording.count(one.won),
        wording.count(one.lost),
        wording.count(one.shared),
    )


def _unshared(report: RunsReport) -> list[Paragraph]:
    told = [
        f"{label(report, place)}: {wording.count(one.success.n - one.shared)} of its {wording.count(one.success.n)} "
        f"episodes of set {one.name} were not played by the first run, and are in no difference."
        for place, run in enumerate(report.runs)
        for one in run.sets
        if place and one.shared < one.success.n
    ]
    return list(map(Paragraph, told))


def _depths(report: RunsReport) -> list[Section]:
    depths = sorted({depth for run in report.runs for one in run.sets for depth, _ in one.depths})
    if not depths:
        return []
    rows = [
        Row((one.name, label(report, place), *(gain(dict(one.depths).get(depth)) for depth in depths)))
        for place, run in enumerate(report.runs)
        for one in run.sets
        if one.depths
    ]
    columns = (Column("Set", "text"), Column("Run", "text"), *(Column(f"Depth {depth}") for depth in depths))
    note = "Points against the first run in each difficulty class, with 95% intervals."
    return [Section("depths", "Difference by depth", (Table(columns, tuple(rows)),), note)]


def _lines(report: RunsReport) -> dict[str, list[tuple[int, Estimate]]]:
    """Return success by iteration of each run on the first set that all of them played."""
    found = [of_sets(run.scores) for run in report.runs]
    shared = [name for name in (found[0] if found else {}) if all(name in one for one in found)]
    if not shared:
        return {}
    return {f"{label(report, place)}, {shared[0]}": one[shared[0]] for place, one in enumerate(found)}


def _heads(report: RunsReport) -> Section:
    rows = (
        Row(
            (
                Link(run.run_id, f"{report.viewer}{addresses.page_of('run', run.run_id)}" if report.viewer else ""),
                run.recipe_name,
                run.method,
                run.model,
                str(run.seed),
                wording.iteration(run.iteration),
                ", ".join(run.differs) or wording.NOTHING,
            )
        )
        for run in report.runs
    )
    columns = (
        Column("Run", "code"),
        *(Column(title, "text") for title in ("Recipe", "Method", "Model")),
        Column("Seed"),
        *(Column(title, "text") for title in ("Compared", "Differs in")),
    )
    return Section("runs", "Runs", (Table(columns, tuple(rows)),))


def _costs(report: RunsReport) -> Section:
    titles = ("Time", "Prompt tokens", "Completion tokens", "Trained tokens")
    rows = (
        Row(
            (
                label(report, place),
                wording.duration(run.seconds),
                wording.count(run.prompt),
                wording.count(run.completion),
                wording.count(run.trained),
            )
        )
        for place, run in enumerate(report.runs)
    )
    note = "Of all iterations up to the one that is compared, without the evaluation of the base model."
    return Section(
        "costs", "Time and tokens", (Table((Column("Run", "text"), *map(Column, titles)), tuple(rows)),), note
    )
