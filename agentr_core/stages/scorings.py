"""Scorings of stored episodes as parts of pages: old and new scores side by side."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.reports import wording
from agentr_core.reports.document import Column, Paragraph, Row, Section, Table
from agentr_core.runtime.context import RunContext
from agentr_core.store.queries.scorings import ScoreComparison, comparisons_by_scoring

_NOTE = (
    "Episodes that `agentr regrade` scored again, beside the scores that they were played with; all other numbers of "
    "this page are of those. Won: lost as it was played, and won now; lost the other way round. Up and down: the "
    "reward is higher or lower. Unreadable: the judge's reply gives no grade."
)


def scored_table(comparisons: Sequence[ScoreComparison]) -> Table:
    """Return a table of old and new scores, with a row for each iteration and kind of episode."""
    columns = (
        Column("Iteration"),
        Column("Episodes of", "text"),
        *map(Column, ("Number", "Success %", "New", "Reward", "New", "Won", "Lost", "Up", "Down", "Unreadable")),
    )
    rows = [
        Row(
            (
                wording.NOTHING if result.iteration is None else str(result.iteration),
                result.episodes_of,
                wording.count(result.episodes),
                wording.percent(result.success),
                wording.percent(result.new_success),
                wording.decimal(result.reward, 3),
                wording.decimal(result.new_reward, 3),
                *map(wording.count, (result.won, result.lost, result.up, result.down, result.unreadable)),
            )
        )
        for result in comparisons
    ]
    return Table(columns, tuple(rows))


def scoring_section(ctx: RunContext, iteration: int | None = None) -> tuple[Section, ...]:
    """Return the section on the scorings of a run's episodes, or of those of one of its iterations;
    none where nothing was scored again.
    """
    blocks: list[Paragraph | Table] = []
    for scoring, comparisons in comparisons_by_scoring(ctx.store, ctx.run_id).items():
        selection = [result for result in comparisons if iteration in (None, result.iteration)]
        if selection:
            blocks += [Paragraph(f"Scored by {scoring.grader}, scoring {scoring.scoring_id}."), scored_table(selection)]
    return (Section("scorings", "Scored again", tuple(blocks), _NOTE),) if blocks else ()
