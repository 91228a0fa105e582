"""What a report says about the questions that a stage of the curriculum chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from agentr_core.methods.catalogue import FUNNEL_OF_GROUPS
from agentr_core.reports import plots, wording
from agentr_core.reports.document import Block, Column, Figure, Row, Section, Table
from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.selections import Selected, load_selection
from agentr_core.store.queries.iterations import trained_outside

_FRONTS = 6
"""Number of fronts that have a row of their own."""


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return how many questions were answered, could be trained on and were chosen, and what became
    of the groups that were sampled for the chosen ones; where nothing was chosen here, only that.
    """
    found = load_selection(place.store, place.iteration_id(iteration))
    if not found and trained_outside(place.store, place.run_id):
        return FUNNEL_OF_GROUPS.stages(place, iteration)
    fit = [one for one in found if one.front is not None]
    chosen = [one for one in fit if one.selected]
    return (
        FunnelStage(name="questions", count=len(found)),
        FunnelStage(name="fit to be chosen", count=len(fit), rejected=_reasons(found, fitting=False)),
        FunnelStage(name="chosen questions", count=len(chosen), rejected=_reasons(found, fitting=True)),
        *FUNNEL_OF_GROUPS.stages(place, iteration),
    )


def selection_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section of an iteration's selection; none where it selects nothing."""
    found = load_selection(place.store, place.iteration_id(iteration))
    if not found:
        return ()
    config = place.recipe.et_agent.curriculum
    how = "front by front, the last by crowding distance" if config.select == "pareto" else "at random"
    note = (
        f"Each question was answered {config.rollouts} times; S is the standard deviation over its answers, of their "
        f"correctness and of their {config.counts}. Questions are chosen {how}; the first front is 0. View v_selection "
        "has all."
    )
    return (Section("selection", "Selected questions", tuple(_blocks(found)), note),)


def _blocks(found: Sequence[Selected]) -> Iterator[Block]:
    others, chosen = ([_point(one) for one in found if one.selected is flag] for flag in (False, True))
    caption = "Questions by the dispersion of correctness (across) and of cost (up); the chosen ones are coloured."
    left = [point for point in others if point is not None]
    yield Figure(plots.scatter(left, [point for point in chosen if point is not None], caption), caption)
    yield _fronts(found)


def _point(one: Selected) -> plots.Point | None:
    return None if one.s_corr is None or one.s_tool is None else (one.s_corr, one.s_tool)


def _fronts(found: Sequence[Selected]) -> Table:
    """Return a table of the first fronts, the later ones together, and questions in no front."""
    groups: dict[str, list[Selected]] = {}
    for one in sorted(found, key=lambda one: (one.front is None, one.front or 0)):
        later = f"{_FRONTS} and later"
        name = "none" if one.front is None else str(one.front) if one.front < _FRONTS else later
        groups.setdefault(name, []).append(one)
    titles = ("Questions", "Chosen", "Correctness, %", "Cost", "S of correctness", "S of cost")
    rows = (Row((name, *_cells(some))) for name, some in groups.items())
    return Table((Column("Front", "text"), *(Column(title) for title in titles)), tuple(rows))


def _cells(some: Sequence[Selected]) -> tuple[str, ...]:
    spread = [point for one in some if (point := _point(one)) is not None]
    corr, tool = (fmean(point[axis] for point in spread) if spread else None for axis in (0, 1))
    return (
        wording.count(len(some)),
        wording.count(sum(one.selected for one in some)),
        wording.percent(fmean(one.correctness for one in some)),
        wording.decimal(fmean(one.cost for one in some)),
        wording.decimal(corr, 3),
        wording.decimal(tool, 3),
    )


def _reasons(found: Sequence[Selected], *, fitting: bool) -> dict[str, int]:
    counted = Counter(one.reason for one in found if (one.front is not None) is fitting and not one.selected)
    return dict(sorted(counted.items()))
