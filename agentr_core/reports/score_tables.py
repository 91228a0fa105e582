"""Tables that compare the models of a run: records in, plain tables out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentr_core.reports import wording
from agentr_core.reports.document import (
    Cell,
    Column,
    Estimate,
    IterationScore,
    Measured,
    Meter,
    Promoted,
    Row,
    RowTone,
    SetScore,
    Table,
    Unfinished,
    Whisker,
)

# Evaluations that are not finished, as rows and sentences of a report: how far they are, and no
# score.


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


def scores(all_scores: Sequence[IterationScore], current: int, pending: Sequence[Unfinished] = ()) -> Table:
    """Return success, reward, steps to success and episodes of every model, and how far those are
    that are still evaluated.
    """
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
    known = {score.iteration for score in all_scores}
    first = {one.iteration: one for one in reversed(pending) if one.iteration not in known}
    return Table(columns, (*rows, *unfinished_rows(columns, sorted(first.values(), key=lambda one: one.iteration))))


def lost(all_scores: Sequence[IterationScore]) -> list[str]:
    """Return a sentence for each model with episodes that failed for good: how many, and how they
    count.
    """
    ways = {"out": "left out of the means", "zero": "counted as failures with reward 0"}
    return [
        f"{wording.iteration(score.iteration)}: episodes that failed for good, {ways[score.lost_as]}: "
        f"{wording.count(score.lost)}."
        for score in all_scores
        if score.lost
    ]


def promoted(found: Promoted) -> str:
    """Return a sentence about the model with which the run goes on."""
    name, success = wording.iteration(found.iteration), wording.percent(found.success)
    return f"Promoted: {name}, with {success}% success on the development set {found.development} the best so far."


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


def sets(all_scores: Sequence[IterationScore], current: int, pending: Sequence[Unfinished] = ()) -> Table:
    """Return success of every model on every held-out set, with the paired difference to the base
    model, and how far those are that are still played.
    """
    columns = (
        Column("Model", "text"),
        Column("Set", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column("Against base"),
        Column("Instances"),
        Column("Episodes"),
    )
    rows = [
        Row(
            (
                wording.iteration(score.iteration),
                name,
                wording.percent(found.success.value),
                wording.interval(found.success),
                _whisker(found.success),
                gain(found.versus_base),
                wording.count(found.instances),
                wording.count(found.success.n),
            ),
            _tone(score, current),
        )
        for name in played_once(all_scores)
        for score in all_scores
        if (found := score.of_set(name))
    ]
    shown = set_names(all_scores)
    return Table(columns, (*rows, *unfinished_rows(columns, [one for one in pending if one.name in shown])))


def world_tables(all_scores: Sequence[IterationScore], current: int) -> Table:
    """Return success and reward of every model in each of several worlds, with 95% intervals, their
    means over the worlds, and those over all episodes.
    """
    columns = (
        Column("World", "text"),
        Column("Model", "text"),
        Column("Success % (95% interval)"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Against base"),
        Column("Recovered %"),
        Column(f"Recovered reward {wording.TIMES}100"),
        Column("Episodes"),
    )
    rows = [
        _world_row(score, current, name, found)
        for name in dict.fromkeys(one.name for score in all_scores for one in score.worlds)
        for score in all_scores
        if (found := score.of_set(name))
    ]
    for score in all_scores:
        if score.worlds:
            # Each world counts the same, however many episodes it has.
            cells = (
                "mean of worlds",
                wording.iteration(score.iteration),
                wording.percent(_mean([world.success for world in score.worlds])),
                wording.percent(_mean([world.reward for world in score.worlds])),
                wording.NOTHING,
                wording.percent(_mean([world.revision for world in score.worlds])),
                wording.percent(_mean([world.revision_reward for world in score.worlds])),
                wording.NOTHING,
            )
            rows.append(Row(cells, _tone(score, current)))
    rows += [_world_row(score, current, "all episodes", score) for score in all_scores if score.worlds]
    return Table(columns, tuple(rows))


def _world_row(score: IterationScore, current: int, name: str, found: SetScore | IterationScore) -> Row:
    return Row(
        (
            name,
            wording.iteration(score.iteration),
            _measured(found.success),
            _measured(found.reward),
            gain(found.versus_base),
            _measured(found.revision),
            _measured(found.revision_reward),
            wording.count(found.success.n),
        ),
        _tone(score, current),
    )


def _mean(estimates: Sequence[Estimate | None]) -> float | None:
    """Return the mean of estimates; None where one of them is missing."""
    known = [estimate.value for estimate in estimates if estimate]
    return fmean(known) if known and len(known) == len(estimates) else None


def _measured(estimate: Estimate | None) -> Cell:
    """Return a share with its interval in one cell: in two, this table is wider than a page."""
    return wording.measured(estimate) if estimate else wording.NOTHING


def set_by_depth(all_scores: Sequence[IterationScore], name: str, current: int) -> Table:
    """Return success on one set for each difficulty class (rows) and model (columns), and the
    current one's gain.
    """
    played = [(score.iteration, found) for score in all_scores if (found := score.of_set(name))]
    cells = {(iteration, part.depth): part for iteration, found in played for part in found.by_depth}
    columns = (
        Column("Depth", "text"),
        Column("Episodes"),
        *(Column(wording.iteration(iteration), "meter") for iteration, _ in played),
        Column(f"{wording.iteration(current).capitalize()} against base"),
    )
    rows = []
    for depth in sorted({depth for _, depth in cells}):
        parts = [cells.get((iteration, depth)) for iteration, _ in played]
        now = cells.get((current, depth))
        rows.append(
            Row(
                (
                    str(depth),
                    wording.count(max(part.success.n for part in parts if part)),
                    *(_meter(part.success if part else None) for part in parts),
                    gain(now.versus_base if now else None),
                )
            )
        )
    return Table(columns, tuple(rows))


def pass_at(all_scores: Sequence[IterationScore]) -> Table:
    """Return the chance that one of k sampled episodes succeeds, for each k: of all instances and
    by difficulty.
    """
    found = [(score, one) for score in all_scores for one in score.sets if one.pass_at]
    depths = sorted({part.depth for _, one in found for at in one.pass_at for part in at.by_depth})
    columns = (
        Column("Model", "text"),
        Column("Set", "text"),
        Column("Measure", "text"),
        Column("%"),
        Column("95% interval"),
        *(Column(f"Depth {depth}") for depth in depths),
        Column("Instances"),
    )
    rows = []
    for score, one in found:
        for at in one.pass_at:
            by_depth = {part.depth: part.success for part in at.by_depth}
            rows.append(
                Row(
                    (
                        wording.iteration(score.iteration),
                        one.name,
                        f"pass@{at.k}",
                        wording.percent(at.success.value),
                        wording.interval(at.success),
                        *(wording.percent(by_depth[d].value) if d in by_depth else wording.NOTHING for d in depths),
                        wording.count(at.success.n),
                    )
                )
            )
    return Table(columns, tuple(rows))


def set_names(all_scores: Sequence[IterationScore]) -> tuple[str, ...]:
    """Return the names of the held-out sets that some model played, in their order."""
    return tuple(dict.fromkeys(one.name for score in all_scores for one in score.sets))


def played_once(all_scores: Sequence[IterationScore]) -> tuple[str, ...]:
    """Return the names of the sets without pass@k: those of one episode an instance."""
    sampled = {one.name for score in all_scores for one in score.sets if one.pass_at}
    return tuple(name for name in set_names(all_scores) if name not in sampled)


def gain(estimate: Estimate | None) -> Cell:
    """Return a difference in points with its interval, or a dash."""
    if estimate is None:
        return wording.NOTHING
    return Measured(wording.points(estimate.value), wording.points_interval(estimate))


def revision(all_scores: Sequence[IterationScore], current: int) -> Table:
    """Return success from failed prefixes for every model that took the revision test."""
    columns = (
        Column("Model", "text"),
        Column("Recovered %"),
        Column("95% interval"),
        Column("", "whisker"),
        Column(f"Reward {wording.TIMES}100"),
        Column("95% interval"),
        Column("Prefixes"),
    )
    rows = (
        Row(
            (
                wording.iteration(score.iteration),
                wording.percent(score.revision.value),
                wording.interval(score.revision),
                _whisker(score.revision),
                wording.percent(score.revision_reward.value if score.revision_reward else None),
                wording.interval(score.revision_reward),
                wording.count(score.revision.n),
            ),
            _tone(score, current),
        )
        for score in all_scores
        if score.revision
    )
    return Table(columns, tuple(rows))


def loops(all_scores: Sequence[IterationScore], current: int) -> Table:
    """Return the loop metric: repeats of each length in an episode, and the share of episodes that
    loop.
    """
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
