"""Evaluations that are not finished, as rows and sentences of a report: how far they are, and no
score.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row
from agentr_core.reports.records import Unfinished


def unfinished_rows(columns: Sequence[Column], pending: Sequence[Unfinished]) -> tuple[Row, ...]:
    """Return a row for each evaluation that is not finished, in a table of scores."""

    def row(one: Unfinished) -> Row:
        known = {
            "Model": wording.iteration(one.iteration),
            "Set": wording.label(one.name),
            "Success %": "not finished",
            "Episodes": _progress(one),
        }
        return Row(tuple(None if column.drawn else known.get(column.title, wording.NOTHING) for column in columns))

    return tuple(map(row, pending))


def unfinished(pending: Sequence[Unfinished]) -> list[str]:
    """Return a sentence for each model whose evaluation is not finished: how far it is, and what
    goes on with it.
    """
    told: dict[int, list[str]] = {}
    for one in pending:
        told.setdefault(one.iteration, []).append(f"{_progress(one)} episodes of {wording.label(one.name)}")
    return [
        f"{wording.iteration(number)}: the evaluation is not finished: {', '.join(parts)}; "
        "the command that began the run goes on with it."
        for number, parts in told.items()
    ]


def _progress(one: Unfinished) -> str:
    of = "" if one.planned is None else f" of {wording.count(one.planned)}"
    return f"{wording.count(one.episodes)}{of}"
