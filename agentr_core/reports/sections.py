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
    Transcripts,
)
from agentr_core.reports.preference_section import preferences
from agentr_core.reports.records import (
    BASE,
    ErrorRecord,
    Estimate,
    IterationReport,
    JudgeRecord,
    LengthCount,
    SetScore,
)


def sections(report: IterationReport) -> tuple[Section, ...]:
    """Return the sections of a report in order: those of revision samples and of preference pairs
    by method.
    """
    return (
        _headline(report),
        _scores(report),
        *(_sets(report) if any(score.sets for score in report.scores) else [_depths(report)]),
        _revision(report),
        _loops(report),
        _funnel(report),
        *([_survival(report), _judge(report)] if report.revises else []),
        *([preferences(report.preferences)] if report.preferences else []),
        _time(report),
        _tokens(report),
        _errors(report),
        *([_examples(report)] if report.revises else []),
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
        return _missing("headline", "Held-out success", "this iteration has not been evaluated on held-out instances")
    blocks: list[Block] = [found]
    if len(report.scores) > 1:
        drawing = plots.success(report.scores, report.iteration)
        blocks.append(Figure(drawing, "Success in percent with 95% intervals; the dashed line is the base model."))
    return Section("headline", "Held-out success", tuple(blocks))


def _scores(report: IterationReport) -> Section:
    title = "Score by iteration"
    if not report.scores:
        return _missing("scores", title, "no model of this run has been evaluated")
    note = "Success is the flag that the environment sets itself; reward is the mean final score."
    if report.interval_method:
        note += f" Intervals: {report.interval_method}."
    table = score_tables.scores(report.scores, report.iteration)
    return Section("scores", title, (table, *map(Paragraph, score_tables.lost(report.scores))), note)


def _depths(report: IterationReport) -> Section:
    title = "Success by depth"
    if not any(score.by_depth for score in report.scores):
        return _missing("depth", title, "the environment names no difficulty classes, or no model has been evaluated")
    note = "Percent of held-out episodes solved in each difficulty class, with 95% intervals."
    return Section("depth", title, (score_tables.by_depth(report.scores),), note)


def _sets(report: IterationReport) -> Iterator[Section]:
    note = "Differences to the base model are in points, with 95% intervals, on the same episodes."
    yield Section("sets", "Held-out sets", (score_tables.sets(report.scores, report.iteration),), note)
    deep = [
        block
        for name in score_tables.played_once(report.scores)
        if any(score.by_depth for score in _played(report, name))
        for block in (
            Paragraph(f"Set {name}"),
            score_tables.set_by_depth(report.scores, name, report.iteration),
        )
    ]
    if deep:
        note = "Percent of episodes solved in each difficulty class, with 95% intervals."
        yield Section("depth", "Success by depth", tuple(deep), note)
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
        return _missing("revision", title, "the recipe has it switched off, or the base model failed on no instance")
    note = (
        "Failed episodes of the base model are cut at a random step and replayed; the model goes on from there. The "
        "prefixes are chosen once, are the same for every model, and nothing tells it that they fail."
    )
    return Section("revision", title, (score_tables.revision(report.scores, report.iteration),), note)


def _loops(report: IterationReport) -> Section:
    title = "Loops"
    if not any(score.loops for score in report.scores):
        return _missing("loops", title, "no held-out episodes to count repetitions in")
    note = (
        "Mean number of positions in an episode at which L actions repeat the L actions right before. "
        "An episode loops when a sequence comes at least three times in a row."
    )
    return Section("loops", title, (score_tables.loops(report.scores, report.iteration),), note)


def _funnel(report: IterationReport) -> Section:
    title = "From trees to training rows"
    if not report.funnel:
        return _missing("funnel", title, "this iteration built no training data")
    note = "What came out of each stage; indented, what the stage turned away and why."
    return Section("funnel", title, (tables.funnel(report.funnel),), note)


def _survival(report: IterationReport) -> Section:
    title = "Splice survival"
    record = report.survival
    if record is None:
        said = "splices were not played in the environment; the splice modes verified and continued do that"
        return _missing("survival", title, said)
    if record.tried == 0:
        return _missing("survival", title, "there was no splice to play")
    said = (
        f"{wording.count(record.survived)} of {wording.count(record.tried)} splices "
        f"({wording.percent(record.survived / record.tried)}%) still reached the required reward when played live."
    )
    return Section("survival", title, (Paragraph(said), tables.survival(record)))


def _judge(report: IterationReport) -> Section:
    title = "Judge"
    record = report.judge
    if record is None:
        return _missing("judge", title, "no judge was asked in this iteration")
    blocks: list[Block] = [tables.verdicts(record), tables.judge_rates(record), *_lengths(record)]
    if record.oracle:
        blocks.append(tables.oracle(record.oracle))
    else:
        blocks.append(Paragraph("Not measured: accuracy against an oracle; none was given."))
    note = f"Verdicts of {record.model or 'the acting model'} on the steps of bad paths."
    return Section("judge", title, tuple(blocks), note)


def _lengths(record: JudgeRecord) -> Iterator[Block]:
    if not any(item.count for item in record.revision_lengths):
        yield Paragraph("Not measured: revision length; no spliced pair has a step judged bad.")
        return
    mean, median = _centre(record.revision_lengths)
    caption = (
        f"Revision length: steps from the split to the first error. Mean {mean:.1f}, median {median}, "
        f"over {wording.count(sum(item.count for item in record.revision_lengths))} spliced pairs."
    )
    drawing = plots.histogram(record.revision_lengths)
    yield Figure(drawing, caption, (Paragraph(caption), tables.revision_lengths(record.revision_lengths)))


def _time(report: IterationReport) -> Section:
    title = "Where time went"
    total = sum(item.seconds for item in report.time)
    if total <= 0:
        return _missing("time", title, "no timings were recorded")
    parts = tuple(Part(wording.label(item.activity), item.seconds / total) for item in report.time)
    note = "Waits of several episodes for the environment at one time are summed: the total may exceed the clock's."
    return Section("time", title, (Stack(parts), tables.time(report.time)), note)


def _tokens(report: IterationReport) -> Section:
    title = "Tokens"
    if report.tokens is None:
        return _missing("tokens", title, "the backend of the model counted no tokens")
    blocks: list[Block] = [tables.tokens(report.tokens)]
    if report.tokens.cut:
        blocks.append(tables.cut_replies(report.tokens.cut))
    else:
        blocks.append(
            Paragraph("Not measured: replies that their token limit cut; none was drawn, or no backend told.")
        )
    if report.tokens.bills:
        blocks.append(tables.bills(report.tokens.bills))
    return Section("tokens", title, tuple(blocks))


def _errors(report: IterationReport) -> Section:
    title = "Errors and stop reasons"
    record = report.errors
    if record is None:
        return _missing("errors", title, "no events were recorded")
    return Section("errors", title, tuple(_error_blocks(record)))


def _error_blocks(record: ErrorRecord) -> Iterator[Block]:
    if record.refused:
        yield tables.tallies("Refused action, by the environment's first words", "Steps", record.refused)
    else:
        yield Paragraph("No collected action was refused, or the environment does not tell.")
    if record.stops:
        yield tables.stops(record)
    else:
        yield Paragraph("Not measured: why episodes stopped.")
    yield tables.faults(record) if record.faults else Paragraph("No exception was met.")


def _examples(report: IterationReport) -> Section:
    title = "Revision samples"
    if not report.examples:
        return _missing("samples", title, "this iteration made no revision sample")
    return Section("samples", title, (Transcripts(report.examples),), "Conversations exactly as they are trained on.")


def _recipe(report: IterationReport) -> Section:
    if not report.recipe_yaml:
        return _missing("recipe", "Recipe", "the resolved recipe was not stored with the run")
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
        return _missing("versions", title, "no versions or hashes were stored with the run")
    return Section("versions", title, tuple(blocks))


def _missing(key: str, title: str, why: str) -> Section:
    return Section(key, title, (Paragraph(f"Not measured: {why}."),))


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


def _centre(lengths: tuple[LengthCount, ...]) -> tuple[float, int]:
    """Return mean and lower median of a histogram with at least one count."""
    total = sum(item.count for item in lengths)
    mean = sum(item.steps * item.count for item in lengths) / total
    seen = 0
    for item in sorted(lengths, key=lambda item: item.steps):
        seen += item.count
        if 2 * seen >= total:
            return mean, item.steps
    raise AssertionError("unreachable: the counts sum to the total")
