"""The page of a whole run: how success, data and cost changed from iteration to iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from agentr_core.reports import document, iteration, plots, wording
from agentr_core.reports.comparison import MEANS_NOTE, GroupMean, group_means_table
from agentr_core.reports.document import (
    Block,
    Cell,
    Column,
    Estimate,
    Figure,
    IterationReport,
    IterationScore,
    Legend,
    Link,
    ModelUsage,
    Paragraph,
    Row,
    RowTone,
    Section,
    Table,
    Whisker,
    report_name,
    reports_of_one_run,
    unmeasured_section,
)
from agentr_core.reports.iteration import gain_cell
from agentr_core.reports.iteration import sections as sections_of

# The table that compares one model for several worlds with a model for each world.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeScores:
    """The scores of the models of one iteration, by world; a world that was not evaluated is
    missing.
    """

    iteration: int
    mode: str
    """Whether one model played all worlds, or each world has its own."""
    success: Mapping[str, Estimate]
    reward: Mapping[str, Estimate]


def modes_table(scores: Sequence[ModeScores], measure: Literal["success", "reward"], worlds: Sequence[str]) -> Table:
    """Return a row for each iteration and mode, with a column for each world and the mean over
    worlds. Intervals are at 95%.
    """
    columns = (Column("Model", "text"), Column("Trained as", "text"), *map(Column, worlds), Column("mean"))
    rows = []
    for score in scores:
        values: Mapping[str, Estimate] = getattr(score, measure)
        cells = [wording.estimate_text(values[name]) if name in values else wording.NOTHING for name in worlds]
        mean = fmean(values[name].value for name in worlds) if len(values) == len(worlds) else None
        rows.append(Row((wording.iteration_name(score.iteration), score.mode, *cells, wording.percent(mean))))
    return Table(columns, tuple(rows))


_LAST_ITERATION_SECTIONS = ("headline", "scores")
"""The sections of the last iteration with which the page begins."""
_TEST, _REVISION = "test", "revision test"


def sections(reports: Sequence[IterationReport]) -> tuple[Section, ...]:
    """Return the sections of the page of a run, given its reports.

    Raises:
        ValueError: there is no report, or the reports are not all of one run.
    """
    run_reports = reports_of_one_run(reports)
    last_report = run_reports[-1]
    by_key = {section.key: section for section in sections_of(last_report)}
    series = success_series(last_report.scores)
    return (
        *(by_key[key] for key in _LAST_ITERATION_SECTIONS),
        # With only one series, its curve is already in the headline.
        *([] if len(series) == 1 else [curves_section("Success by iteration", series)]),
        _funnels(run_reports),
        _costs(run_reports),
        *last_report.run_sections,
        _pages(run_reports),
        by_key["recipe"],
        by_key["versions"],
    )


def success_series(scores: Sequence[IterationScore]) -> dict[str, list[tuple[int, Estimate]]]:
    """Return the success of each iteration's model, as pairs of iteration and estimate, by the name
    of each held-out set with one episode per instance, of each world, and of the revision test.
    """
    series: dict[str, list[tuple[int, Estimate]]] = {}
    for score in scores:
        names = iteration.single_episode_sets([score])
        set_scores = [
            set_score
            for set_score in (*score.sets, *score.worlds)
            if set_score in score.worlds or set_score.name in names
        ]
        for set_score in set_scores:
            series.setdefault(set_score.name, []).append((score.iteration, set_score.success))
        if not set_scores:
            series.setdefault(_TEST, []).append((score.iteration, score.success))
        if score.revision:
            series.setdefault(_REVISION, []).append((score.iteration, score.revision))
    return series


def curves_section(title: str, series: Mapping[str, Sequence[tuple[int, Estimate]]]) -> Section:
    """Return a section with success by iteration as lines with error bars and as a table."""
    if not series:
        return unmeasured_section("curves", title, "no model of this run has been evaluated")
    numbers = sorted({number for points in series.values() for number, _ in points})
    by_name = {name: dict(points) for name, points in series.items()}
    rows = tuple(Row((name, *(_estimate_cell(by_name[name].get(number)) for number in numbers))) for name in by_name)
    table = Table((Column("Success %", "text"), *(Column(wording.iteration_name(number)) for number in numbers)), rows)
    caption = "Success in percent with 95% intervals."
    blocks: tuple[Block, ...] = (Figure(plots.set_curves(series, title), caption), Legend(tuple(series)), table)
    return Section("curves", title, blocks)


def _estimate_cell(estimate: Estimate | None) -> Cell:
    return wording.estimate_text(estimate) if estimate else None


def _funnels(reports: Sequence[IterationReport]) -> Section:
    title = "Training data by iteration"
    reports_by_kind: dict[tuple[str, tuple[str, ...]], list[IterationReport]] = {}
    for report in reports:
        if report.funnel:
            reports_by_kind.setdefault((report.funnel_title, tuple(stage.name for stage in report.funnel)), []).append(
                report
            )
    if not reports_by_kind:
        return unmeasured_section("funnels", title, "no stage of data construction has been counted")
    tables = []
    for (title_of_kind, _), same_reports in reports_by_kind.items():
        columns = (Column(title_of_kind, "text"), *(Column(wording.report_title(report)) for report in same_reports))
        rows = []
        for stages in zip(*(report.funnel for report in same_reports), strict=True):
            counts = (wording.count(stage.count) for stage in stages)
            rows.append(Row((wording.label(stages[0].name), *counts), "strong"))
            for name in dict.fromkeys(name for stage in stages for name in stage.rejected_by_reason):
                rejections = (stage.rejected_by_reason.get(name) for stage in stages)
                cells = (None if count is None else f"{wording.MINUS}{wording.count(count)}" for count in rejections)
                rows.append(Row((wording.label(name), *cells), "minor"))
        tables.append(Table(columns, tuple(rows)))
    return Section("funnels", title, tuple(tables), "Below each count: what was turned away before it came to that.")


def _costs(reports: Sequence[IterationReport]) -> Section:
    title = "Time, tokens and cost"
    if not any(report.seconds_by_activity or report.tokens for report in reports):
        return unmeasured_section("costs", title, "nothing was timed")
    note = (
        "Time is the sum of its parts; what several workers do side by side counts in full. "
        "A prompt counts once for each of its replies, a trained token once for each pass over the data. "
        "The evaluation of the base model is no iteration's."
    )
    activities = tuple(dict.fromkeys(activity for report in reports for activity in report.seconds_by_activity))
    seconds = [
        [
            sum(report.seconds_by_activity.values()),
            *(report.seconds_by_activity.get(activity, 0.0) for activity in activities),
        ]
        for report in reports
    ]
    formatters: list[Callable[[float], str]] = [wording.duration] * (1 + len(activities))
    times = _iteration_table(reports, ("Time", *map(str.capitalize, activities)), seconds, formatters)

    titles = ["Prompt tokens", "Completion tokens", "Trained tokens"]
    counts: list[list[float]] = [
        [tokens.prompt, tokens.completion, tokens.num_trained] if (tokens := report.tokens) else [0, 0, 0]
        for report in reports
    ]
    formatters = [lambda number: wording.count(round(number))] * 3
    if any(bill.cost is not None for report in reports for bill in _usages(report)):
        titles.append("Cost")
        formatters.append(wording.decimal)
        for report, numbers in zip(reports, counts, strict=True):
            numbers.append(sum(bill.cost or 0.0 for bill in _usages(report)))
    # Two tables, since a single one would be wider than a page.
    return Section("costs", title, (times, _iteration_table(reports, titles, counts, formatters)), note)


def _iteration_table(
    reports: Sequence[IterationReport],
    titles: Sequence[str],
    amounts: Sequence[Sequence[float]],
    formatters: Sequence[Callable[[float], str]],
) -> Table:
    """Return a table with a row for each iteration and, if there are several, their total."""

    def row(name: str, numbers: Sequence[float], tone: RowTone = "") -> Row:
        return Row((name, *(formatter(number) for formatter, number in zip(formatters, numbers, strict=True))), tone)

    rows = [
        row(wording.iteration_name(report.iteration), numbers) for report, numbers in zip(reports, amounts, strict=True)
    ]
    if len(rows) > 1:
        rows.append(row("total", [sum(numbers) for numbers in zip(*amounts, strict=True)], "strong"))
    return Table((Column("Iteration", "text"), *map(Column, titles)), tuple(rows))


def _usages(report: IterationReport) -> Sequence[ModelUsage]:
    return report.tokens.usages if report.tokens else ()


def _pages(reports: Sequence[IterationReport]) -> Section:
    """Return links to the page of each iteration and to the lists of the viewer."""
    last = reports[-1]
    names = (
        tuple(dict.fromkeys(name for report in reports for name in report.num_rows_by_list)) if last.viewer_url else ()
    )
    scores = {score.iteration: score for report in reports for score in report.scores}
    rows = []
    for report in reports:
        score = scores.get(report.iteration)
        success: Cell = None
        if score is not None:
            success = _estimate_cell(score.success)
        elif any(evaluation.iteration == report.iteration for evaluation in report.unfinished_evaluations):
            success = "not finished"
        counts: list[Cell] = []
        for name in names:
            count = report.num_rows_by_list.get(name, 0)
            path = document.list_path(name, run=report.run_id, iteration=report.iteration)
            counts.append(Link(wording.count(count), f"{report.viewer_url}{path}") if count else None)
        rows.append(
            Row(
                (
                    Link(wording.report_title(report), f"{report_name(report.iteration)}.html"),
                    report.date,
                    success,
                    *counts,
                )
            )
        )
    columns = (
        *(Column("Page", "text"), Column("Date", "text"), Column("Success %")),
        *(Column(name.capitalize()) for name in names),
    )
    note = f"The counts lead into the viewer, which shows them at {last.viewer_url} once the command agentr view runs."
    return Section("reports", "Pages", (Table(columns, tuple(rows)),), note if names else "")


# Runs side by side: the last model of each on the same held-out episodes, and its cost.


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScore:
    """The score of the model of a run on a set, paired with the first run's on the same episodes.

    `difference` is None for the first run, and if no episode is shared; `num_won` and `num_lost`
    count the shared episodes that only one of the two solved.
    """

    name: str
    success: Estimate
    difference: Estimate | None = None
    num_shared: int = 0
    num_won: int = 0
    num_lost: int = 0
    depth_differences: tuple[tuple[int, Estimate], ...] = ()
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
    differing_sections: tuple[str, ...] = ()
    """The names of the sections of its recipe that differ from those of the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsReport:
    """Two or more runs; differences are relative to the first."""

    runs: tuple[RunColumn, ...]
    date: str
    viewer_url: str = ""
    means: tuple[GroupMean, ...] = ()
    """Means over groups of runs that differ only in the seed; empty if no group has two or more."""


def runs_sections(report: RunsReport) -> tuple[Section, ...]:
    """Return the sections of the page: the runs, success side by side, by depth, curves, cost."""
    remarks = [
        f"{run_label(report, index)}: {wording.count(score.success.n - score.num_shared)} of its "
        f"{wording.count(score.success.n)} episodes of set {score.name} were not played by the first run, and are in "
        "no difference."
        for index, run in enumerate(report.runs)
        for score in run.sets
        if index and score.num_shared < score.success.n
    ]
    # The curves are of the first set that all runs played.
    series = [success_series(run.scores) for run in report.runs]
    set_name = next((name for name in (series[0] if series else {}) if all(name in sets for sets in series)), None)
    curves_by_label = (
        {}
        if set_name is None
        else {f"{run_label(report, i)}, {set_name}": sets[set_name] for i, sets in enumerate(series)}
    )
    return (
        _runs_section(report),
        Section("paired", _PAIRED_TITLE, (paired_table(report), *map(Paragraph, remarks)), _PAIRED_NOTE),
        *(
            [Section("means", "Means over seeds", (group_means_table(report.means),), MEANS_NOTE)]
            if report.means
            else []
        ),
        *_depth_sections(report),
        curves_section("Success by iteration", curves_by_label),
        _costs_of_runs(report),
    )


_PAIRED_TITLE = "Success, and differences on the same episodes"
_PAIRED_NOTE = (
    "The model that each run ends with. Differences to the first run are in points, paired by episode (same instance "
    "and number and, in a revision test, the same replayed steps) with 95% intervals, clustered where several "
    "instances are one under different names. Won: episodes that this run solved and the first did not; lost: the "
    "other way round."
)


def run_label(report: RunsReport, index: int) -> str:
    """Return the label of a run: its recipe, and its id if other runs have the same recipe."""
    run = report.runs[index]
    is_shared_name = sum(other_run.recipe_name == run.recipe_name for other_run in report.runs) > 1
    return f"{run.recipe_name} {run.run_id[:6]}" if is_shared_name else run.recipe_name


def paired_table(report: RunsReport) -> Table:
    """Return a row for each set and run: success, and the paired difference to the first run."""
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
    names = tuple(dict.fromkeys(score.name for run in report.runs for score in run.sets))
    rows = []
    for name in names:
        for index, run in enumerate(report.runs):
            for score in run.sets:
                if score.name != name:
                    continue
                value = score.success
                difference_cells: tuple[Cell, ...] = (*(wording.NOTHING,) * 3, wording.count(value.n))
                if index:
                    counts = map(wording.count, (score.num_won, score.num_lost, score.num_shared))
                    difference_cells = (gain_cell(score.difference), *counts)
                whisker = Whisker(value.low, value.value, value.high)
                rows.append(
                    Row((name, run_label(report, index), wording.estimate_text(value), whisker, *difference_cells))
                )
    return Table(columns, tuple(rows))


def _depth_sections(report: RunsReport) -> list[Section]:
    depths = sorted({depth for run in report.runs for score in run.sets for depth, _ in score.depth_differences})
    if not depths:
        return []
    rows = [
        Row(
            (
                score.name,
                run_label(report, index),
                *(gain_cell(dict(score.depth_differences).get(depth)) for depth in depths),
            )
        )
        for index, run in enumerate(report.runs)
        for score in run.sets
        if score.depth_differences
    ]
    columns = (Column("Set", "text"), Column("Run", "text"), *(Column(f"Depth {depth}") for depth in depths))
    note = "Points against the first run in each difficulty class, with 95% intervals."
    return [Section("depths", "Difference by depth", (Table(columns, tuple(rows)),), note)]


def _runs_section(report: RunsReport) -> Section:
    rows = (
        Row(
            (
                Link(
                    run.run_id,
                    f"{report.viewer_url}{document.page_path('run', run.run_id)}" if report.viewer_url else "",
                ),
                run.recipe_name,
                run.method,
                run.model,
                str(run.seed),
                wording.iteration_name(run.iteration),
                ", ".join(run.differing_sections) or wording.NOTHING,
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


def _costs_of_runs(report: RunsReport) -> Section:
    titles = ("Time", "Prompt tokens", "Completion tokens", "Trained tokens")
    rows = (
        Row(
            (
                run_label(report, index),
                wording.duration(run.seconds),
                wording.count(run.prompt),
                wording.count(run.completion),
                wording.count(run.trained),
            )
        )
        for index, run in enumerate(report.runs)
    )
    note = "Of all iterations up to the one that is compared, without the evaluation of the base model."
    return Section(
        "costs", "Time and tokens", (Table((Column("Run", "text"), *map(Column, titles)), tuple(rows)),), note
    )
