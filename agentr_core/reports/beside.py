"""The table that compares one model for several worlds with a model for each world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from agentr_core.reports import wording
from agentr_core.reports.document import Cell, Column, Row, Table
from agentr_core.reports.records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideScore:
    """The scores of the models of one iteration, by world; a world that was not played is
    missing.
    """

    iteration: int
    mode: str
    """Whether one model played all worlds, or each world has its own."""
    success: Mapping[str, Estimate]
    reward: Mapping[str, Estimate]


def beside_table(scores: Sequence[BesideScore], measure: Literal["success", "reward"], worlds: Sequence[str]) -> Table:
    """Return a row for each iteration and mode, with a column for each world and the mean over
    worlds. Intervals are at 95%.
    """
    columns = (Column("Model", "text"), Column("Trained as", "text"), *map(Column, worlds), Column("mean"))
    return Table(columns, tuple(_row(score, getattr(score, measure), worlds) for score in scores))


def _row(score: BesideScore, found: Mapping[str, Estimate], worlds: Sequence[str]) -> Row:
    cells: list[Cell] = [wording.measured(found[name]) if name in found else wording.NOTHING for name in worlds]
    whole = fmean(found[name].value for name in worlds) if len(found) == len(worlds) else None
    return Row((wording.iteration(score.iteration), score.mode, *cells, wording.percent(whole)))
