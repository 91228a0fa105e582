"""Tables about data construction, judge, cost and errors: records in, plain tables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr_core.reports import wording
from agentr_core.reports.document import Bar, Cell, Column, Row, Table
from agentr_core.reports.records import (
    Bill,
    Counts,
    ErrorRecord,
    FunnelStage,
    TokenCounts,
)


def funnel(stages: Sequence[FunnelStage]) -> Table:
    """Return the stages of data construction as a ledger: each count, and below it what was turned
    away and why.
    """
    most = max(stage.count for stage in stages)
    rows = []
    before: int | None = None
    for stage in stages:
        cells: tuple[Cell, ...] = (wording.label(stage.name), wording.count(stage.count), _ratio(stage.count, before))
        rows.append(Row((*cells, Bar(wording.share(stage.count, most) or 0.0)), "strong"))
        rows += [
            Row((wording.label(reason), f"{wording.MINUS}{wording.count(count)}", "", None), "minor")
            for reason, count in by_count(stage.rejected).items()
        ]
        before = stage.count
    return Table((Column("Stage", "text"), Column("Count"), Column("Of stage before"), Column("", "bar")), tuple(rows))


def time(spent: Mapping[str, float]) -> Table:
    """Return time and share of each activity, and their total."""
    total = sum(spent.values())
    rows = [
        Row((wording.label(name), wording.duration(seconds), wording.percent(wording.share(seconds, total))))
        for name, seconds in spent.items()
    ]
    rows.append(Row(("total", wording.duration(total), wording.percent(1.0)), "strong"))
    return Table((Column("Activity", "text"), Column("Time"), Column("Share %")), tuple(rows))


def tokens(counts: TokenCounts) -> Table:
    """Return tokens read, written, and trained by class; where training took another number than
    one pass over the dataset has, that of the pass by class, and that of training.
    """
    trained = sum(counts.trained.values())
    whole = counts.all_trained == trained
    rows = [
        Row(("prompt", wording.count(counts.prompt), ""), "strong"),
        Row(("completion", wording.count(counts.completion), ""), "strong"),
        Row(
            (
                "trained (with loss)" if whole else "with loss, in one pass",
                wording.count(trained),
                wording.percent(1.0) if trained else wording.NOTHING,
            ),
            "strong",
        ),
    ]
    rows += [
        Row((wording.label(name), wording.count(count), wording.percent(wording.share(count, trained))), "minor")
        for name, count in counts.trained.items()
    ]
    if not whole:
        rows.append(Row(("trained (with loss)", wording.count(counts.all_trained), ""), "strong"))
    return Table((Column("Tokens", "text"), Column("Count"), Column("Of trained %")), tuple(rows))


def cut_replies(found: Mapping[str, tuple[int, int]]) -> Table:
    """Return how many replies were cut by their token limit, by purpose."""
    return _cuts(found, "Replies", "Cut by the limit")


def unreadable_replies(found: Mapping[str, tuple[int, int]]) -> Table:
    """Return how many replies of helpers were cut within a thought, by role."""
    return _cuts(found, "Replies of", "Cut within a thought")


def _cuts(found: Mapping[str, tuple[int, int]], whole: str, part: str) -> Table:
    rows = (
        Row(
            (
                wording.label(name),
                wording.count(replies),
                wording.count(cut),
                wording.percent(wording.share(cut, replies)),
            )
        )
        for name, (replies, cut) in found.items()
    )
    return Table((Column(whole, "text"), Column("Count"), Column(part), Column("%")), tuple(rows))


def bills(items: Sequence[Bill]) -> Table:
    """Return what served models read, wrote and cost, by role."""
    columns = (Column("Served model", "text"), Column("", "code"), Column("Requests"), Column("Prompt tokens"))
    rows = (
        Row(
            (
                wording.label(bill.role),
                bill.model,
                wording.count(bill.requests),
                wording.count(bill.prompt),
                wording.count(bill.completion),
                wording.decimal(bill.cost, 4),
            )
        )
        for bill in items
    )
    return Table((*columns, Column("Completion tokens"), Column("Cost")), tuple(rows))


def stops(record: ErrorRecord) -> Table:
    """Return why tree paths and held-out episodes ended."""
    collected = sum(stop.collected for stop in record.stops)
    evaluated = sum(stop.evaluated for stop in record.stops)
    rows = (
        Row(
            (
                wording.label(stop.reason),
                wording.count(stop.collected),
                wording.percent(wording.share(stop.collected, collected)),
                wording.count(stop.evaluated),
                wording.percent(wording.share(stop.evaluated, evaluated)),
            )
        )
        for stop in record.stops
    )
    columns = (
        Column("Stop reason", "text"),
        Column("Collected paths"),
        Column("%"),
        Column("Held-out episodes"),
        Column("%"),
    )
    return Table(columns, tuple(rows))


def faults(record: ErrorRecord) -> Table:
    """Return exceptions by class and phase, with how many were not healed by a retry."""
    columns = (Column("Exception", "code"), Column("Phase", "text"), Column("Count"), Column("Lost episodes"))
    rows = (
        Row((item.error, wording.label(item.phase), wording.count(item.count), wording.count(item.lost)))
        for item in record.faults
    )
    return Table(columns, tuple(rows))


def counts(title: str, unit: str, found: Counts, whole: int | None = None) -> Table:
    """Return counts with their share of the whole (by default their sum) as numbers and bars."""
    total = sum(found.values()) if whole is None else whole
    rows = (
        Row(
            (
                wording.label(name),
                wording.count(count),
                wording.percent(wording.share(count, total)),
                Bar(wording.share(count, total) or 0.0),
            )
        )
        for name, count in found.items()
    )
    return Table((Column(title, "text"), Column(unit), Column("%"), Column("", "bar")), tuple(rows))


def named(title: str, values: Mapping[str, str]) -> Table:
    """Return names with their values as code."""
    return Table((Column(title, "text"), Column("", "code")), tuple(map(Row, values.items())))


def _ratio(count: int, before: int | None) -> str:
    if not before:
        return wording.NOTHING
    return f"{wording.TIMES}{count / before:.1f}" if count > before else f"{100 * count / before:.1f}%"


def by_count(found: Counts) -> dict[str, int]:
    """Return counts, the largest first."""
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def worlds(data: Mapping[str, Counts]) -> Table:
    """Return what was made in each world, and in all of them; kinds without any are left out."""
    kinds = dict.fromkeys(kind for made in data.values() for kind, count in made.items() if count)
    rows = [*data.items(), ("all", {kind: sum(made.get(kind, 0) for made in data.values()) for kind in kinds})]
    return Table(
        (Column("World", "text"), *(Column(wording.label(kind)) for kind in kinds)),
        tuple(Row((name, *(wording.count(made.get(kind, 0)) for kind in kinds))) for name, made in rows),
    )
