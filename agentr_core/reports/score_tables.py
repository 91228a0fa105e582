"""Tables that compare the models of a run: records in, plain tables out."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.reports import wording
from agentr_core.reports.document import Cell, Column, Meter, Row, RowTone, Table, Whisker
from agentr_core.reports.records import Estimate, IterationScore


def scores(all_scores: Sequence[IterationScore], current: int) -> Table:
    """Return success, reward, steps to success and episodes of every model."""
    columns = (
        Column("Model", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Steps to success"),
        Column("Episodes"),
    )
    rows = (
        Row(
            (
                wording.iteration(score.iteration),
                wording.percent(score.success.value),
                wording.interval(score.success),
                _whisker(score.success),
                wording.percent(score.reward.value),
                wording.decimal(score.steps_to_success, 1),
                wording.count(score.success.n),
            ),
            _tone(score, current),
        )
        for score in all_scores
    )
    return Table(columns, tuple(rows))


def lost(all_scores: Sequence[IterationScore]) -> list[str]:
    """Return a sentence for each model with episodes that failed for good: how many, and how they count."""
    ways = {"out": "left out of the means", "zero": "counted as failures with reward 0"}
    return [
        f"{wording.iteration(score.iteration)}: episodes that failed for good, {ways[score.lost_as]}: "
        f"{wording.count(score.lost)}."
        for score in all_scores
        if score.lost
    ]


def by_depth(all_scores: Sequence[IterationScore]) -> Table:
    """Return success for each difficulty class (rows) and model (columns)."""
    depths = sorted({depth.depth for score in all_scores for depth in score.by_depth})
    found = {(score.iteration, depth.depth): depth.success for score in all_scores for depth in score.by_depth}
    columns = (
        Column("Depth", "text"),
        Column("Episodes"),
        *(Column(wording.iteration(score.iteration), "meter") for score in all_scores),
    )
    rows = []
    for depth in depths:
        estimates = [found.get((score.iteration, depth)) for score in all_scores]
        episodes = sorted({estimate.n for estimate in estimates if estimate})
        rows.append(
            Row(
                (
                    str(depth),
                    wording.TO.join(map(wording.count, episodes[:1] + episodes[1:][-1:])),
                    *map(_meter, estimates),
                )
            )
        )
    return Table(columns, tuple(rows))


def revision(all_scores: Sequence[IterationScore], current: int) -> Table:
    """Return success from failed prefixes for every model that was tested so."""
    columns = (
        Column("Model", "text"),
        Column("Recovered %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column("Prefixes"),
    )
    rows = (
        Row(
            (
                wording.iteration(score.iteration),
                wording.percent(score.revision.value),
                wording.interval(score.revision),
                _whisker(score.revision),
                wording.count(score.revision.n),
            ),
            _tone(score, current),
        )
        for score in all_scores
        if score.revision
    )
    return Table(columns, tuple(rows))


def loops(all_scores: Sequence[IterationScore], current: int) -> Table:
    """Return the loop metric: repeats of each length in an episode, and the share of episodes that loop."""
    longest = max(len(score.loops) for score in all_scores)
    columns = (
        Column("Model", "text"),
        *(Column(f"L={length}") for length in range(1, longest + 1)),
        Column("Looping episodes %"),
    )
    rows = []
    for score in all_scores:
        if score.loops:
            means: list[float | None] = [*score.loops, *[None] * (longest - len(score.loops))]
            cells = (wording.iteration(score.iteration), *map(wording.decimal, means), wording.percent(score.looping))
            rows.append(Row(cells, _tone(score, current)))
    return Table(columns, tuple(rows))


def _tone(score: IterationScore, current: int) -> RowTone:
    return "strong" if score.iteration == current else ""


def _whisker(estimate: Estimate) -> Whisker:
    return Whisker(estimate.low, estimate.value, estimate.high)


def _meter(estimate: Estimate | None) -> Cell:
    if estimate is None:
        return wording.NOTHING
    return Meter(wording.percent(estimate.value), wording.interval(estimate), estimate.value)
