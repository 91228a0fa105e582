"""What a report says about preference pairs: frozen records, filled from the store."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.reports.records import Tally
from agentr_core.store.queries.preferences import PreferenceTrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecord:
    """The preference pairs of an iteration, and how training on them went.

    `margins` counts pairs by reward margin, in bins of a tenth named by their lower ends; `cut`
    counts those whose rejected side was cut.
    """

    kinds: tuple[Tally, ...]
    rejected: tuple[Tally, ...] = ()
    margins: tuple[tuple[float, int], ...] = ()
    cut: int = 0
    steps: tuple[PreferenceTrainingStep, ...] = ()
