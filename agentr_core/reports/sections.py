"""The order of a report: an `IterationReport` in, sections out. A part that was not measured says
so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentr_core.reports import plots, score_tables, wording
from agentr_core.reports.document import (
    BASE,
    Bar,
    Bill,
    Block,
    Cell,
    Column,
    Counts,
    Delta,
    ErrorRecord,
    Estimate,
    Figure,
    FunnelStage,
    Headline,
    IterationReport,
    Listing,
    Paragraph,
    Part,
    Row,
    Section,
    Stack,
    Table,
    TokenCounts,
    not_measured,
)
from agentr_core.reports.score_tables import unfinished

# Tables about data construction, judge, cost and errors: records in, plain tables out.


def funnel(stages: Sequence[FunnelStage]) -> Table:
    """Return the stages of data construction as a ledger: each count, and below it what was turned
    away and why.
    """
    most = max(stage.count for stage in stages)
    rows = []
    before: int | None = None
    for stage in stages:
        ratio = wording.NOTHING
        if before:
            more = stage.count > before
            ratio = f"{wording.TIMES}{stage.count / before:.1f}" if more else f"{100 * stage.count / before:.1f}%"
        cells: tuple[Cell, ...] = (wording.label(stage.name), wording.count(stage.count), ratio)
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


def sections(report: IterationReport) -> tuple[Section, ...]:
    """Return the sections of a report in order, those of its method in their two places."""
    note = "What of the training data each world gave; general data belongs to none."
    return (
        _headline(report),
        _scores(report),
        *_held_out(report),
        _revision(report),
        _loops(report),
        _funnel(report),
        *([Section("data-worlds", "Training data by world", (worlds(report.worlds),), note)] if report.worlds else []),
        *report.data,
        _time(report),
        _tokens(report),
        _errors(report),
        *report.samples,
        _recipe(report),
        _versions(report),
    )


def headline(report: IterationReport) -> Headline | None:
    """Return this iteration's success and its differences, or None when it was not evaluated."""
    score = report.score(report.iteration)
    if score is None:
        return None
    estimate = score.success
    deltas, readings = [], []
    for other, difference in _comparisons(report):
        against = wording.iteration(other)
        if difference:
            deltas.append(Delta(wording.points(difference.value), wording.points_interval(difference), against))
            if difference.low <= 0 <= difference.high:
                readings.append(f"No clear difference from {against}: the interval contains zero.")
            else:
                side = "Above" if difference.low > 0 else "Below"
                readings.append(f"{side} {against}: the 95% interval of the difference excludes zero.")
        elif earlier := report.score(other):
            deltas.append(Delta(wording.points(estimate.value - earlier.success.value), "", against))
    return Headline(
        wording.percent(estimate.value),
        wording.interval(estimate),
        wording.count(estimate.n),
        tuple(deltas),
        " ".join(readings),
    )


def _headline(report: IterationReport) -> Section:
    found = headline(report)
    if found is None:
        title, own = "Held-out success", [one for one in report.unfinished if one.iteration == report.iteration]
        if own:
            return Section("headline", title, tuple(map(Paragraph, unfinished(own))))
        return not_measured("headline", title, "this iteration has not been evaluated on held-out instances")
    blocks: list[Block] = [found]
    if len(report.scores) > 1:
        drawing = plots.success(report.scores, report.iteration)
        blocks.append(Figure(drawing, "Success in percent with 95% intervals; the dashed line is the base model."))
    return Section("headline", "Held-out success", tuple(blocks))


def _scores(report: IterationReport) -> Section:
    title = "Score by iteration"
    if not (report.scores or report.unfinished):
        return not_measured("scores", title, "no model of this run has been evaluated")
    note = "Success is the flag that the environment sets itself; reward is the mean final score."
    if report.interval_method:
        note += f" Intervals: {report.interval_method}."
    table = score_tables.scores(report.scores, report.iteration, report.unfinished)
    said = [
        *([score_tables.promoted(report.promoted)] if report.promoted else []),
        *unfinished(report.unfinished),
        *score_tables.lost(report.scores),
    ]
    return Section("scores", title, (table, *map(Paragraph, said)), note)


def _held_out(report: IterationReport) -> Iterator[Section]:
    """Yield scores by world and by set; where there is one of each, by difficulty alone."""
    scores, names = report.scores, score_tables.played_once(report.scores)
    worlds = tuple(dict.fromkeys(world.name for score in scores for world in score.worlds))
    if worlds:
        note = (
            "One model in each of its worlds, with 95% intervals. Differences to the base model are in points of "
            "success, on the same episodes. In the mean of worlds each world counts the same."
        )
        yield Section("worlds", "Score by world", (score_tables.world_tables(scores, report.iteration),), note)
        deep = tuple(_by_depth(report, worlds, "World"))
        if deep:
            note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth-worlds", "Success by depth in each world", deep, note)
    if any(score.sets for score in scores):
        note = "Differences to the base model are in points, with 95% intervals, on the same episodes."
        sets = score_tables.sets(scores, report.iteration, report.unfinished)
        yield Section("sets", "Held-out sets", (sets,), note)
        deep = tuple(_by_depth(report, names, "Set"))
        if deep:
            note = "Percent of episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth", "Success by depth", deep, note)
        if names != score_tables.set_names(scores):
            note = (
                "pass@k is the chance that at least one of k sampled episodes of an instance succeeds. How far it lies "
                "above pass@1 is what a method that learns from its own samples can gain."
            )
            yield Section("headroom", "Headroom: what sampling reaches", (score_tables.pass_at(scores),), note)
    elif not worlds:
        if any(score.by_depth for score in scores):
            note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
            yield Section("depth", "Success by depth", (score_tables.by_depth(scores),), note)
        else:
            why = "the environment names no difficulty classes, or no model has been evaluated"
            yield not_measured("depth", "Success by depth", why)


def _by_depth(report: IterationReport, names: tuple[str, ...], what: str) -> Iterator[Block]:
    for name in names:
        played = [of_set for score in report.scores if (of_set := score.of_set(name))]
        if any(score.by_depth for score in played):
            yield Paragraph(f"{what} {name}")
            yield score_tables.set_by_depth(report.scores, name, report.iteration)


def _revision(report: IterationReport) -> Section:
    title = "Revision test"
    if not any(score.revision for score in report.scores):
        return not_measured(
            "revision",
            title,
            "the recipe has it switched off, the base model failed on no instance, or it is not finished",
        )
    note = (
        "Failed episodes of the base model are cut at a random step and replayed; the model goes on from there. The "
        "prefixes are chosen once, are the same for every model, and nothing tells it that they fail."
    )
    return Section("revision", title, (score_tables.revision(report.scores, report.iteration),), note)


def _loops(report: IterationReport) -> Section:
    title = "Loops"
    if not any(score.loops for score in report.scores):
        return not_measured("loops", title, "no held-out episodes to count repetitions in")
    note = (
        "Mean number of positions in an episode at which L actions repeat the L actions right before. "
        "An episode loops when a sequence comes at least three times in a row."
    )
    return Section("loops", title, (score_tables.loops(report.scores, report.iteration),), note)


def _funnel(report: IterationReport) -> Section:
    title = report.funnel_title
    if not report.funnel:
        return not_measured("funnel", title, "this iteration built no training data")
    note = "What came out of each stage; indented, what the stage turned away and why."
    return Section("funnel", title, (funnel(report.funnel),), note)


def _time(report: IterationReport) -> Section:
    title = "Where time went"
    total = sum(report.time.values())
    if total <= 0:
        return not_measured("time", title, "no timings were recorded")
    parts = tuple(Part(wording.label(name), seconds / total) for name, seconds in report.time.items())
    note = "Waits for the environment count while no reply is generated. Times of several workers are summed."
    return Section("time", title, (Stack(parts), time(report.time)), note)


def _tokens(report: IterationReport) -> Section:
    title = "Tokens"
    if report.tokens is None:
        return not_measured("tokens", title, "the backend of the model counted no tokens")
    blocks: list[Block] = [tokens(report.tokens)]
    if report.tokens.cut:
        blocks.append(cut_replies(report.tokens.cut))
    else:
        blocks.append(
            Paragraph("Not measured: replies that their token limit cut; none was drawn, or no backend told.")
        )
    if any(count for _, count in report.tokens.unreadable.values()):
        blocks.append(unreadable_replies(report.tokens.unreadable))
    if report.tokens.bills:
        blocks.append(bills(report.tokens.bills))
    return Section("tokens", title, tuple(blocks))


def _errors(report: IterationReport) -> Section:
    title = "Errors and stop reasons"
    record = report.errors
    if record is None:
        return not_measured("errors", title, "no events were recorded")
    blocks: list[Block] = []
    if record.refused:
        blocks.append(counts("Refused action, by the environment's first words", "Steps", record.refused))
    else:
        blocks.append(Paragraph("No collected action was refused, or the environment does not tell."))
    blocks.append(stops(record) if record.stops else Paragraph("Not measured: why episodes stopped."))
    blocks.append(faults(record) if record.faults else Paragraph("No exception was met."))
    return Section("errors", title, tuple(blocks))


def _recipe(report: IterationReport) -> Section:
    if not report.recipe_yaml:
        return not_measured("recipe", "Recipe", "the resolved recipe was not stored with the run")
    listing = Listing(f"{report.recipe_name}, with every default filled in", "yaml", report.recipe_yaml)
    return Section("recipe", "Recipe", (listing,))


def _versions(report: IterationReport) -> Section:
    title = "Versions and hashes"
    blocks: list[Block] = []
    if report.hashes:
        blocks.append(named("Artefact", report.hashes))
    if report.versions:
        blocks.append(named("Software", report.versions))
    if not blocks:
        return not_measured("versions", title, "no versions or hashes were stored with the run")
    return Section("versions", title, tuple(blocks))


def _comparisons(report: IterationReport) -> Iterator[tuple[int, Estimate | None]]:
    if report.iteration == BASE:
        return
    yield BASE, report.versus_base
    if report.iteration - 1 != BASE:
        yield report.iteration - 1, report.versus_previous
