"""Success per iteration of one run, as a short table for a terminal or a Prefect artifact."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Table
from agentr_core.reports.markdown import table_markdown
from agentr_core.reports.records import BASE, Estimate, IterationReport, IterationScore, Unfinished, of_one_run
from agentr_core.reports.score_tables import gain, played_once, promoted, worlds
from agentr_core.reports.unfinished import unfinished_rows


def summary_table(reports: Sequence[IterationReport]) -> str:
    """Return success per iteration with 95% intervals as aligned plain text, one line each, base
    first; below the table, the model that was promoted, if the run promotes the best one.

    Raises:
        ValueError: there is no report, or the reports are not all of one run.
    """
    last = of_one_run(reports)[-1].promoted
    return table_text(_table(reports)) + (f"{promoted(last)}\n" if last else "")


def summary_markdown(reports: Sequence[IterationReport]) -> str:
    """Return the same table in Markdown. Raises `ValueError` as `summary_table` does."""
    return table_markdown(_table(reports))


def table_text(table: Table) -> str:
    """Return a table as aligned plain text, one line a row; drawn columns are left out."""
    kept = [position for position, column in enumerate(table.columns) if not column.drawn]
    columns = [table.columns[position] for position in kept]
    lines = [
        [column.title for column in columns],
        *([str(row.cells[position]) for position in kept] for row in table.rows),
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.ljust(width) if column.kind == "text" else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def _table(reports: Sequence[IterationReport]) -> Table:
    ordered = of_one_run(reports)
    # A later report saw every evaluation that an earlier one saw, and perhaps a repeated one.
    scores = {score.iteration: score for report in ordered for score in report.scores}
    base, pending = scores.get(BASE), ordered[-1].unfinished
    if any(score.worlds for score in scores.values()):
        return worlds([scores[key] for key in sorted(scores)], max(scores))
    if any(score.sets for score in scores.values()):
        return _table_of_sets([scores[key] for key in sorted(scores)], pending)
    columns = (
        Column("Model", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("Against base (95% interval)"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Episodes"),
    )
    rows = [_row(scores[key], base) for key in sorted(scores)]
    return Table(columns, (*rows, *unfinished_rows(columns, [one for one in pending if one.name == "test"])))


def _table_of_sets(scores: Sequence[IterationScore], pending: Sequence[Unfinished]) -> Table:
    columns = (
        Column("Model", "text"),
        Column("Set", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("Against base (95% interval)"),
        Column("Episodes"),
    )
    rows = [
        _set_row(name, score, found.success, found.versus_base)
        for name in played_once(scores)
        for score in scores
        if (found := score.of_set(name))
    ]
    rows += [_set_row("revision test", score, score.revision, None) for score in scores if score.revision]
    rows += [
        _set_row(f"{one.name}, pass@{at.k}", score, at.success, None)
        for score in scores
        for one in score.sets
        for at in (*one.pass_at[:1], *one.pass_at[1:][-1:])
    ]
    return Table(columns, (*rows, *unfinished_rows(columns, pending)))


def _set_row(name: str, score: IterationScore, success: Estimate, versus_base: Estimate | None) -> Row:
    return Row(
        (
            wording.iteration(score.iteration),
            name,
            wording.percent(success.value),
            wording.interval(success),
            gain(versus_base),
            wording.count(success.n),
        )
    )


def _row(score: IterationScore, base: IterationScore | None) -> Row:
    against = gain(score.versus_base)
    if score.versus_base is None and base is not None and score is not base:
        against = wording.points(score.success.value - base.success.value)
    return Row(
        (
            wording.iteration(score.iteration),
            wording.percent(score.success.value),
            wording.interval(score.success),
            against,
            wording.percent(score.reward.value),
            wording.count(score.success.n),
        )
    )
