"""Numbers and names as text: one form for all renderers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from agentr_core.reports.document import (
    BASE_ITERATION,
    Estimate,
    EstimateText,
    IterationReport,
    IterationScore,
    TurnPart,
)
from agentr_core.texts import escape_invisible as escape_invisible

MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
NOTHING = "\N{EN DASH}"
"""The mark in a table for a missing number."""

PART_NAMES: Mapping[TurnPart, str] = {
    "opening": "opening",
    "shared": "shared prefix",
    "bad": "bad path",
    "revision": "revision",
    "good": "good path",
}
"""The names of the parts of a revision sample in a report."""


_SHARE_MEASURE = re.compile(
    r"(?:^|[:/])"
    r"(?:success|success_clustered|reflecting|looping|best_of_\d+_success|(?:pass|always|mixed|never|mean)@\d+)$"
)
"""Measures that are shares, by their names in table `metric`."""


def percent(share: float | None) -> str:
    """Return a share or a mean reward as percent with one decimal, or a dash; only what is below 0
    has a sign.
    """
    return NOTHING if share is None else f"{100 * share:z.1f}".replace("-", MINUS)


def measure_name(name: str) -> str:
    """Return the name of a measure as a heading, with the set of instances before it, if it has
    one: `renamed: success clustered %`.
    """
    heading = name.replace(":", ": ").replace("_", " ")
    return f"{heading} %" if _SHARE_MEASURE.search(name) else heading


def measure_value(name: str, value: float) -> str:
    """Return the value of a measure: a share as percent, and any other number with its digits."""
    return percent(value) if _SHARE_MEASURE.search(name) else decimal(value, 3)


def interval(estimate: Estimate | None) -> str:
    """Return the 95% interval of a share in percent: two numbers with one decimal and a dash
    between them; or only a dash.
    """
    return NOTHING if estimate is None else f"{percent(estimate.low)}{DASH}{percent(estimate.high)}"


def estimate_text(share: Estimate) -> EstimateText:
    """Return a share in percent with its interval, for one cell."""
    return EstimateText(percent(share.value), interval(share))


def points(difference: float) -> str:
    """Return a difference of shares in signed points with one decimal; a true minus sign."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def points_interval(estimate: Estimate) -> str:
    """Return the interval of a difference in points, `+3.1 to +12.4`."""
    return f"{points(estimate.low)} to {points(estimate.high)}"


def count(number: int) -> str:
    """Return a whole number with thousands separated by commas."""
    return f"{number:,}"


def decimal(number: float | None, digits: int = 2) -> str:
    """Return a number with fixed decimals and a true minus sign, or a dash."""
    return NOTHING if number is None else f"{number:z,.{digits}f}".replace("-", MINUS)


def signed(number: float, digits: int = 1) -> str:
    """Return a number with its sign and fixed decimals; a true minus sign, and none for zero."""
    return f"{number:+,.{digits}f}".replace("-", MINUS) if round(number, digits) else f"{0:.{digits}f}"


def share(part: float, whole: float) -> float | None:
    """Return part / whole, or None when the whole is 0."""
    return part / whole if whole else None


def iteration_name(number: int) -> str:
    """Return the name of a model in a report: `base` or `iteration 2`."""
    return "base" if number == BASE_ITERATION else f"iteration {number}"


def model_name(score: IterationScore) -> str:
    """Return the name of the model that has a score."""
    return score.name or iteration_name(score.iteration)


def report_title(report: IterationReport) -> str:
    """Return the name of the model that a report is about."""
    score = report.score(report.iteration)
    return model_name(score) if score else iteration_name(report.iteration)


def label(slug: str) -> str:
    """Return a slug in words: underscores become spaces."""
    return slug.replace("_", " ")


def duration(seconds: float) -> str:
    """Return a time as `41 s`, `12 min 05 s` or `3 h 07 min`; below ten seconds with one
    decimal.
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def moment(when: datetime) -> str:
    """Return a moment in UTC as `2026-11-23 09:41 UTC`."""
    return when.strftime("%Y-%m-%d %H:%M UTC")
