"""What a benchmark reports, as a line of JSON and as a row of a table."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds that have passed: of the wall, or of this process's processors where other work
disturbs.
"""

_HOLDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number. `goal` is a comparison such as ">= 20", or empty where there is none; `note` is
    for people.
    """

    name: str
    value: float
    unit: str
    goal: str = ""
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if not self.goal:
            return None
        sign, number = self.goal.split()
        return bool(_HOLDS[sign](self.value, float(number)))

    def line(self) -> str:
        """Return the measure as one line of JSON, without its note."""
        return json.dumps(
            {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal or None, "ok": self.ok}
        )


def table(measures: Iterable[Measure]) -> str:
    """Return the measures as a Markdown table."""
    rows: list[tuple[str, ...]] = [("measure", "value", "unit", "goal", "met", "note"), ("---",) * 6]
    for m in measures:
        met = {True: "yes", False: "NO", None: "-"}[m.ok]
        value = f"{m.value:.3g}" if m.value < 1000 else f"{m.value:,.0f}"
        rows.append((m.name, value, m.unit, m.goal or "-", met, m.note))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
