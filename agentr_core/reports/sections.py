"""The order of a report: an `IterationReport` in, sections out. A part that was not measured says
so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentr_core.reports import plots, score_tables, tables, wording
from agentr_core.reports.document import (
    Block,
    Delta,
    Figure,
    Headline,
    Listing,
    Paragraph,
    Part,
    Section,
    Stack,
    not_measured,
)
from agentr_core.reports.records import BASE, ErrorRecord, Estimate, IterationReport, SetScore
from agentr_core.reports.unfinished import unfinished


def sections(report: IterationReport) -> tuple[Section, ...]:
    """Return the sections of a report in order, those of its method in their two places."""
    return (
        _headline(report),
        _scores(report),
        *_held_out(report),
        _revision(report),
        _loops(report),
        _funnel(report),
        *([_data_by_world(report)] if report.worlds else []),
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
    return Headline(
        wording.percent(estimate.value),
        wording.interval(estimate),
        wording.count(estimate.n),
        tuple(_deltas(report, estimate.value)),
        " ".join(_reading(report)),
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


def _depths(report: IterationReport) -> Section:
    title = "Success by depth"
    if not any(score.by_depth for score in report.scores):
        return not_measured(
            "depth", title, "the environment names no difficulty classes, or no model has been evaluated"
        )
    note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
    return Section("depth", title, (score_tables.by_depth(report.scores),), note)


def _held_out(report: IterationReport) -> Iterator[Section]:
    """Yield scores by world and by set; where there is one of each, by difficulty alone."""
    worlds = dict.fromkeys(one.name for score in report.scores for one in score.worlds)
    if worlds:
        yield from _worlds(report, tuple(worlds))
    if any(score.sets for score in report.scores):
        yield from _sets(report)
    elif not worlds:
        yield _depths(report)


def _worlds(report: IterationReport, names: tuple[str, ...]) -> Iterator[Section]:
    note = (
        "One model in each of its worlds, with 95% intervals. Differences to the base model are in points of success, "
        "on the same episodes. In the mean of worlds each world counts the same."
    )
    yield Section("worlds", "Score by world", (score_tables.worlds(report.scores, report.iteration),), note)
    deep = tuple(_by_depth(report, names, "World"))
    if deep:
        note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
        yield Section("depth-worlds", "Success by depth in each world", deep, note)


def _by_depth(report: IterationReport, names: tuple[str, ...], what: str) -> Iterator[Block]:
    for name in names:
        if any(score.by_depth for score in _played(report, name)):
            yield Paragraph(f"{what} {name}")
            yield score_tables.set_by_depth(report.scores, name, report.iteration)


def _sets(report: IterationReport) -> Iterator[Section]:
    note = "Differences to the base model are in points, with 95% intervals, on the same episodes."
    yield Section(
        "sets", "Held-out sets", (score_tables.sets(report.scores, report.iteration, report.unfinished),), note
    )
    deep = tuple(_by_depth(report, score_tables.played_once(report.scores), "Set"))
    if deep:
        note = "Percent of episodes solved in each difficulty class, with 95% intervals."
        yield Section("depth", "Success by depth", deep, note)
    if score_tables.played_once(report.scores) != score_tables.set_names(report.scores):
        note = (
            "pass@k is the chance that at least one of k sampled episodes of an instance succeeds. How far it lies "
            "above pass@1 is what a method that learns from its own samples can gain."
        )
        yield Section("headroom", "Headroom: what sampling reaches", (score_tables.pass_at(report.scores),), note)


def _played(report: IterationReport, name: str) -> list[SetScore]:
    return [found for score in report.scores if (found := score.of_set(name))]


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
    return Section("funnel", title, (tables.funnel(report.funnel),), note)


def _data_by_world(report: IterationReport) -> Section:
    note = "What of the training data each world gave; general data belongs to none."
    return Section("data-worlds", "Training data by world", (tables.worlds(report.worlds),), note)


def _time(report: IterationReport) -> Section:
    title = "Where time went"
    total = sum(report.time.values())
    if total <= 0:
        return not_measured("time", title, "no timings were recorded")
    parts = tuple(Part(wording.label(name), seconds / total) for name, seconds in report.time.items())
    note = "Waits for the environment count while no reply is generated. Times of several workers are summed."
    return Section("time", title, (Stack(parts), tables.time(report.time)), note)


def _tokens(report: IterationReport) -> Section:
    title = "Tokens"
    if report.tokens is None:
        return not_measured("tokens", title, "the backend of the model counted no tokens")
    blocks: list[Block] = [tables.tokens(report.tokens)]
    if report.tokens.cut:
        blocks.append(tables.cut_replies(report.tokens.cut))
    else:
        blocks.append(
            Paragraph("Not measured: replies that their token limit cut; none was drawn, or no backend told.")
        )
    if any(count for _, count in report.tokens.unreadable.values()):
        blocks.append(tables.unreadable_replies(report.tokens.unreadable))
    if report.tokens.bills:
        blocks.append(tables.bills(report.tokens.bills))
    return Section("tokens", title, tuple(blocks))


def _errors(report: IterationReport) -> Section:
    title = "Errors and stop reasons"
    record = report.errors
    if record is None:
        return not_measured("errors", title, "no events were recorded")
    return Section("errors", title, tuple(_error_blocks(record)))


def _error_blocks(record: ErrorRecord) -> Iterator[Block]:
    if record.refused:
        yield tables.counts("Refused action, by the environment's first words", "Steps", record.refused)
    else:
        yield Paragraph("No collected action was refused, or the environment does not tell.")
    if record.stops:
        yield tables.stops(record)
    else:
        yield Paragraph("Not measured: why episodes stopped.")
    yield tables.faults(record) if record.faults else Paragraph("No exception was met.")


def _recipe(report: IterationReport) -> Section:
    if not report.recipe_yaml:
        return not_measured("recipe", "Recipe", "the resolved recipe was not stored with the run")
    listing = Listing(f"{report.recipe_name}, with every default filled in", "yaml", report.recipe_yaml)
    return Section("recipe", "Recipe", (listing,))


def _versions(report: IterationReport) -> Section:
    title = "Versions and hashes"
    blocks: list[Block] = []
    if report.hashes:
        blocks.append(tables.named("Artefact", report.hashes))
    if report.versions:
        blocks.append(tables.named("Software", report.versions))
    if not blocks:
        return not_measured("versions", title, "no versions or hashes were stored with the run")
    return Section("versions", title, tuple(blocks))


def _comparisons(report: IterationReport) -> Iterator[tuple[int, Estimate | None]]:
    if report.iteration == BASE:
        return
    yield BASE, report.versus_base
    if report.iteration - 1 != BASE:
        yield report.iteration - 1, report.versus_previous


def _deltas(report: IterationReport, now: float) -> Iterator[Delta]:
    for other, estimate in _comparisons(report):
        against = wording.iteration(other)
        if estimate:
            yield Delta(wording.points(estimate.value), wording.points_interval(estimate), against)
        elif score := report.score(other):
            yield Delta(wording.points(now - score.success.value), "", against)


def _reading(report: IterationReport) -> Iterator[str]:
    for other, estimate in _comparisons(report):
        if estimate is None:
            continue
        if estimate.low <= 0 <= estimate.high:
            yield f"No clear difference from {wording.iteration(other)}: the interval contains zero."
        else:
            side = "Above" if estimate.low > 0 else "Below"
            yield f"{side} {wording.iteration(other)}: the 95% interval of the difference excludes zero."
