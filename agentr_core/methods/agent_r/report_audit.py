"""The audit of the judge: whether it finds the first error where the values of the tree fall, and
where the environment's oracle sees it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from agentr_core.methods.agent_r.oracle import rate
from agentr_core.reports import plots, tables, wording
from agentr_core.reports.document import Block, Column, Figure, Measured, Paragraph, Row, Section, Table, not_measured
from agentr_core.store.queries.judging import JudgedStep, PathAudit
from agentr_core.types import Verdict

TITLE = "Judge beside the tree's values"
_FARTHEST = 5
"""Distances of this much or more share the outermost bars."""
Witnesses = Callable[[PathAudit], tuple[int | None, int | None]]
_COMPARED: dict[str, Witnesses] = {
    "judge and tree": lambda one: (one.judge, one.tree),
    "judge and oracle": lambda one: (one.judge, one.oracle),
    "tree and oracle": lambda one: (one.tree, one.oracle),
}


def audit(paths: Sequence[PathAudit], steps: Sequence[JudgedStep]) -> Section:
    """Return the section that compares the first errors of judged paths; without paths, it says
    that none was judged.
    """
    if not paths:
        return not_measured("audit", TITLE, "no path was judged in this iteration")
    note = (
        "By the tree the first error is the step of a bad path that is worth least beside its siblings: the mean "
        "reward backed up through them, less its own. All witnesses look at the steps that the judge was shown; the "
        "first error is the same where they name the same step, or none. View v_critic_audit has each path."
    )
    return Section("audit", TITLE, tuple(_blocks(paths, steps)), note)


def audit_of_run(paths: Mapping[int, Sequence[PathAudit]]) -> Section:
    """Return the section of a run: how often the witnesses agree, by iteration."""
    some = [one for found in paths.values() for one in found]
    compared = {name: pick for name, pick in _COMPARED.items() if _known(name, some)}
    rows = (
        Row((wording.iteration(number), wording.count(len(found)), *_same(found, compared)))
        for number, found in paths.items()
    )
    titles = (f"Same: {name}, %" for name in compared)
    table = Table((Column("Iteration", "text"), Column("Judged paths"), *map(Column, titles)), tuple(rows))
    note = "How often two witnesses name the same first error of a bad path, or both none; 95% intervals."
    return Section("audit-run", f"{TITLE} over the run", (table,), note)


def order_of_drops(steps: Sequence[JudgedStep]) -> float | None:
    """Return the chance that a step judged bad lost more value than one judged good, ties counting
    half: the area under the ROC curve. None if either kind of step is missing.
    """
    bad, good = (
        sorted(one.value_drop for one in steps if one.verdict is verdict and one.value_drop is not None)
        for verdict in (Verdict.BAD, Verdict.GOOD)
    )
    if not bad or not good:
        return None
    return sum(bisect_left(good, drop) + bisect_right(good, drop) for drop in bad) / (2 * len(bad) * len(good))


def _blocks(paths: Sequence[PathAudit], steps: Sequence[JudgedStep]) -> Iterator[Block]:
    compared = {name: pick for name, pick in _COMPARED.items() if _known(name, paths)}
    yield _agreement(paths, compared)
    if not any(one.has_oracle for one in paths):
        yield Paragraph("Not measured: the oracle's first errors; the environment has no oracle.")
    yield from _distances(paths)
    yield _drops(steps)
    order = order_of_drops(steps)
    if order is not None:
        yield Paragraph(
            f"A step judged bad lost more value than one judged good in {wording.percent(order)}% of all such pairs; "
            "50% would be chance."
        )
    if len({one.depth for one in paths}) > 1:
        yield _by_depth(paths, compared)


def _known(name: str, paths: Sequence[PathAudit]) -> list[PathAudit]:
    return [one for one in paths if one.has_oracle] if "oracle" in name else list(paths)


def _agreement(paths: Sequence[PathAudit], compared: Mapping[str, Witnesses]) -> Table:
    titles = ("Same first error, %", "Within one step, %", "Mean distance, steps", "Both name one", "Paths")
    rows = []
    for name, pick in compared.items():
        pairs = [pick(one) for one in _known(name, paths)]
        same = rate([one == other for one, other in pairs])
        near = rate(
            [one == other or (one is not None and other is not None and abs(one - other) < 2) for one, other in pairs]
        )
        apart = [one - other for one, other in pairs if one is not None and other is not None]
        cells = (
            wording.measured(same),
            wording.measured(near),
            wording.signed(fmean(apart)) if apart else None,
            wording.count(len(apart)),
            wording.count(len(pairs)),
        )
        rows.append(Row((name, *cells)))
    return Table((Column("Witnesses", "text"), *map(Column, titles)), tuple(rows))


def _distances(paths: Sequence[PathAudit]) -> Iterator[Block]:
    apart = [one.judge - one.tree for one in paths if one.judge is not None and one.tree is not None]
    if not apart:
        yield Paragraph("Not measured: distances; on no path do both the judge and the tree name an error.")
        return
    counted = Counter(max(-_FARTHEST, min(_FARTHEST, steps)) for steps in apart)
    counts = {_distance(steps): counted[steps] for steps in range(min(counted), max(counted) + 1)}
    caption = (
        "Steps by which the judge sees the first error later than the tree (left of 0: earlier), "
        f"on {wording.count(len(apart))} paths."
    )
    instead = tables.counts("Steps later", "Paths", counts)
    yield Figure(
        plots.bars(counts, "Paths by distance of the judge's first error from the tree's"),
        caption,
        (Paragraph(caption), instead),
    )


def _distance(steps: int) -> str:
    beyond = {-_FARTHEST: "\N{LESS-THAN OR EQUAL TO}", _FARTHEST: "\N{GREATER-THAN OR EQUAL TO}"}
    return f"{beyond.get(steps, '')}{wording.signed(steps, 0)}"


def _drops(steps: Sequence[JudgedStep]) -> Table:
    titles = ("Judged steps", "With siblings", "Mean value drop", "Worth less than siblings, %")
    rows = []
    for verdict in Verdict:
        some = [one for one in steps if one.verdict is verdict]
        drops = [one.value_drop for one in some if one.value_drop is not None]
        if some:
            cells = (
                wording.count(len(some)),
                wording.count(len(drops)),
                wording.signed(fmean(drops), 3) if drops else None,
                wording.percent(fmean(drop > 0 for drop in drops)) if drops else None,
            )
            rows.append(Row((str(verdict), *cells)))
    return Table((Column("Verdict", "text"), *map(Column, titles)), tuple(rows))


def _by_depth(paths: Sequence[PathAudit], compared: Mapping[str, Witnesses]) -> Table:
    depths = sorted({one.depth for one in paths}, key=lambda depth: (depth is None, depth or 0))
    rows = []
    for depth in depths:
        some = [one for one in paths if one.depth == depth]
        rows.append(Row(("none" if depth is None else str(depth), wording.count(len(some)), *_same(some, compared))))
    titles = (f"Same: {name}, %" for name in compared)
    return Table((Column("Depth", "text"), Column("Paths"), *map(Column, titles)), tuple(rows))


def _same(paths: Sequence[PathAudit], compared: Mapping[str, Witnesses]) -> Iterator[Measured | None]:
    """Yield, for each two witnesses, how often they name the same first error."""
    for name, pick in compared.items():
        pairs = [pick(one) for one in _known(name, paths)]
        same = rate([one == other for one, other in pairs]) if pairs else None
        yield None if same is None else wording.measured(same)
