"""The report's section on behaviour: what right answers cost, by model and by source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from agentr_core.evaluation.metrics import Estimate
from agentr_core.methods.et_agent.measures import OF_SOURCE
from agentr_core.recipes.evaluation import TEST
from agentr_core.reports import plots, wording
from agentr_core.reports.document import Block, Column, Figure, Measured, Paragraph, Row, Section, Table
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.measures import Measures, load_measures

_ROWS: Mapping[str, tuple[str, float, int]] = {
    "performance": ("P, %", 100, 1),
    "performance_gain_over_base": ("P above base, points", 100, 1),
    "efficiency": ("Efficiency, %", 100, 1),
    "efficiency_gain_over_base": ("Efficiency above base", 100, 1),
    "f1": ("F1, knowledge, %", 100, 1),
    "judged": ("Right, mathematics, %", 100, 1),
    "exact_match": ("EM, %", 100, 1),
    "tool_productivity": ("Tool productivity", 1, 1),
    "successful_execution": ("Successful execution, %", 100, 1),
    "reasoning_length": ("P per 1,000 tokens", 1, 2),
    "redundant_calls": ("Redundant calls, %", 100, 1),
    "conciseness": ("Concise, %", 100, 1),
    "nudged_right": ("Corrected by a nudge, %", 100, 1),
}
"""The title, factor and digits of each metric."""
_AXES: Mapping[str, str] = {
    "performance": "performance",
    "efficiency": "efficiency",
    "tool_productivity": "tool productivity",
    "successful_execution": "execution",
    "reasoning_length": "brevity",
    "redundant_calls": "no redundancy",
    "conciseness": "conciseness",
}
"""Axes of the radar chart; that of redundant calls shows 1 minus the metric."""


def behaviour_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on behaviour up to an iteration; none if nothing is known."""
    found = {number: load_measures(place.store, evaluation_id(place, number, TEST)) for number in range(iteration + 1)}
    known = {number: measures for number, measures in found.items() if "efficiency" in measures}
    if not known:
        return ()
    curriculum = place.recipe.et_agent.curriculum
    counts = curriculum.counts
    note = (
        "Means with 95% intervals, clustered by question. P is the mean reward, efficiency the mean of reward / "
        f"{counts} (reward / 1 where there are none), successful execution that of reward / (1 + failed {counts}). "
        f"With t {counts} on average, tool productivity is 100 P t / (t + 0.1). All are defined in "
        "agentr_core/methods/et_agent/behaviour.py."
        + (" Calls are also those that were refused, since none was left." if curriculum.refused_calls else "")
    )
    return (Section("behaviour", "Behaviour", tuple(_blocks(known, iteration)), note),)


def _blocks(known: Mapping[int, Measures], iteration: int) -> Iterator[Block]:
    if iteration in known:
        yield _radar(known, iteration)
    yield _table({wording.iteration(number): measures for number, measures in known.items()})
    newest = known[max(known)]
    sources = {name.removeprefix(OF_SOURCE).rpartition("/")[0] for name in newest if name.startswith(OF_SOURCE)}
    if len(sources) > 1:
        yield Paragraph(f"{wording.iteration(max(known)).capitalize()} by source of the questions:")
        yield _table({source: _of(newest, source) for source in sorted(sources)})


def _of(measures: Measures, source: str) -> Measures:
    prefix = f"{OF_SOURCE}{source}/"
    return {name.removeprefix(prefix): one for name, one in measures.items() if name.startswith(prefix)}


def _radar(known: Mapping[int, Measures], iteration: int) -> Figure:
    axes = [name for name in _AXES if all(name in measures for measures in known.values())]
    values = {
        wording.iteration(number): [_worth(name, measures[name]) for name in axes] for number, measures in known.items()
    }
    ends = [max(*column, 0.0) or 1.0 for column in zip(*values.values(), strict=True)]
    shares = {
        name: [max(0.0, value) / end for value, end in zip(line, ends, strict=True)] for name, line in values.items()
    }
    caption = (
        "Behaviour on the test set: this iteration coloured, the base dashed. Each axis ends at the best of the models "
        "shown; outward is better."
    )
    return Figure(plots.radar([_AXES[name] for name in axes], shares, wording.iteration(iteration), caption), caption)


def _worth(name: str, estimate: Estimate) -> float:
    return 1 - estimate.mean if name == "redundant_calls" else estimate.mean


def _table(models: Mapping[str, Measures]) -> Table:
    """Return a row for each metric that any has, and a column for each model, or source."""
    rows = (
        Row((_ROWS[name][0], *(_cell(measures.get(name), *_ROWS[name][1:]) for measures in models.values())))
        for name in _ROWS
        if any(name in measures for measures in models.values())
    )
    return Table((Column("Metric", "text"), *map(Column, models)), tuple(rows))


def _cell(estimate: Estimate | None, factor: float, digits: int) -> Measured | None:
    if estimate is None:
        return None
    text, low, high = (
        wording.decimal(factor * value, digits).replace("-", wording.MINUS)
        for value in (estimate.mean, estimate.low, estimate.high)
    )
    return Measured(text, f"{low} to {high}" if math.isfinite(estimate.low) else "")
