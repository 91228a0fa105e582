"""Agent-R's sections of a report: records in, sections out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import fmean, median_low

from agentr_core.methods.agent_r.report_records import JudgeRecord, OracleAgreement, SpliceSurvival
from agentr_core.reports import plots, tables, wording
from agentr_core.reports.document import (
    Block,
    Column,
    Figure,
    Paragraph,
    RevisionExample,
    Row,
    Section,
    Table,
    Transcripts,
    not_measured,
)
from agentr_core.reports.records import Estimate


def survival(record: SpliceSurvival | None) -> Section:
    """Return the section on how many splices survived being played or, for None, that none was."""
    title = "Splice survival"
    if record is None:
        said = "splices were not played in the environment; the splice modes verified and continued do that"
        return not_measured("survival", title, said)
    if record.tried == 0:
        return not_measured("survival", title, "there was no splice to play")
    said = (
        f"{wording.count(record.survived)} of {wording.count(record.tried)} splices "
        f"({wording.percent(record.survived / record.tried)}%) still reached the required reward, and not before the "
        "revision, when played live."
    )
    return Section("survival", title, (Paragraph(said), _outcomes(record)))


def judge(record: JudgeRecord | None) -> Section:
    """Return the section on what the judge said or, for None, that no judge was asked."""
    title = "Judge"
    if record is None:
        return not_measured("judge", title, "no judge was asked in this iteration")
    blocks: list[Block] = [tables.counts("Verdict", "Steps", record.verdicts), _rates(record), *_lengths(record)]
    if record.oracle:
        blocks.append(_oracle(record.oracle))
    else:
        blocks.append(Paragraph("Not measured: accuracy against an oracle; none was given."))
    note = f"Verdicts of {record.model or 'the acting model'} on the steps of bad paths."
    return Section("judge", title, tuple(blocks), note)


def revision_samples(examples: tuple[RevisionExample, ...]) -> Section:
    """Return the section that shows samples turn by turn."""
    title = "Revision samples"
    if not examples:
        return not_measured("samples", title, "this iteration made no revision sample")
    return Section("samples", title, (Transcripts(examples),), "Conversations exactly as they are trained on.")


def _lengths(record: JudgeRecord) -> Iterator[Block]:
    if not any(record.revision_lengths.values()):
        yield Paragraph("Not measured: revision length; no spliced pair has a step judged bad.")
        return
    mean, median = _centre(record.revision_lengths)
    caption = (
        f"Revision length: steps from the split to the first error. Mean {mean:.1f}, median {median}, "
        f"over {wording.count(sum(record.revision_lengths.values()))} spliced pairs."
    )
    if shared := record.revision_lengths.get(0, 0):
        caption += (
            f" In {wording.count(shared)} of them the first bad step is one that both paths share (0 steps), and the "
            "good path goes on after it."
        )
    drawing = plots.histogram(record.revision_lengths, "Steps from the split to the first error")
    yield Figure(drawing, caption, (Paragraph(caption), _length_table(record.revision_lengths)))


def _outcomes(record: SpliceSurvival) -> Table:
    outcomes = {"survived": record.survived, **tables.by_count(record.died)}
    return tables.counts("Outcome", "Splices", outcomes, whole=record.tried)


def _rates(record: JudgeRecord) -> Table:
    """Return the shares by which a judge is monitored: unparsable replies and paths without an
    error.
    """
    steps = sum(record.verdicts.values())
    rows = (
        _rate("Unparsable replies", record.verdicts.get("unparsable", 0), steps, "judged steps"),
        _rate("No error found", record.no_error, record.paths, "judged paths"),
    )
    return Table((Column("Rate", "text"), Column("%"), Column("Count"), Column("Of", "text")), rows)


def _length_table(lengths: Mapping[int, int]) -> Table:
    rows = (Row((wording.count(steps), wording.count(count))) for steps, count in lengths.items())
    return Table((Column("Steps to first error"), Column("Pairs")), tuple(rows))


def _oracle(record: OracleAgreement) -> Table:
    rows = [Row(("Verdict accuracy", *_estimate(record.accuracy)), "strong")]
    if record.first_error:
        rows.append(Row(("Same first error", *_estimate(record.first_error))))
    rows.append(Row(("Precision of “bad”", wording.percent(record.precision), wording.NOTHING, wording.NOTHING)))
    rows.append(Row(("Recall of “bad”", wording.percent(record.recall), wording.NOTHING, wording.NOTHING)))
    columns = (Column("Judge against oracle", "text"), Column("%"), Column("95% interval"), Column("n"))
    return Table(columns, tuple(rows))


def _estimate(estimate: Estimate) -> tuple[str, str, str]:
    return wording.percent(estimate.value), wording.interval(estimate), wording.count(estimate.n)


def _rate(name: str, part: int, whole: int, unit: str) -> Row:
    return Row(
        (name, wording.percent(wording.share(part, whole)), wording.count(part), f"{wording.count(whole)} {unit}")
    )


def _centre(lengths: Mapping[int, int]) -> tuple[float, int]:
    """Return the mean and the lower median of a histogram with at least one count."""
    each = sorted(Counter(lengths).elements())
    return fmean(each), median_low(each)
