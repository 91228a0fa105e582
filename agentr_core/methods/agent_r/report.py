"""Agent-R's part of a report, read from the store."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low
from typing import Literal

from agentr_core.episodes.transcript import OPENING, opening_length
from agentr_core.evaluation.metrics import success_rate
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.critique import ask_oracle
from agentr_core.reports import iteration, plots, wording
from agentr_core.reports.document import (
    Block,
    Column,
    Counts,
    Estimate,
    EstimateText,
    Figure,
    FunnelStage,
    Paragraph,
    RevisionExample,
    Row,
    Section,
    Table,
    Transcripts,
    Turn,
    TurnPart,
    not_measured,
)
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report import estimate, expert_episodes, rejected_by, to_rows
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_critiques
from agentr_core.store.queries import datasets, runs, trees
from agentr_core.store.queries.datasets import trained_revisions
from agentr_core.store.queries.runs import iteration_state
from agentr_core.store.queries.trees import JudgedStep, PathAudit, pair_verdicts
from agentr_core.texts import counted
from agentr_core.types import Critique, Message, Role, Sample, Span, StepVerdict, Verdict

# The numbers that a report has about judged paths and spliced revisions, read from the store.


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceSurvival:
    """How many splices were played in the environment (`tried`), and how many of them cleared alpha
    and gained reward after the revision (`survived`); `died` counts the others by reason.
    """

    tried: int
    survived: int
    died: Counts = field(default_factory=dict)
    continuations: int = 0
    """The number of episodes in which a model went on from a bad path."""
    won: int = 0
    """The number of continuations that succeeded."""
    player: str = ""
    """The label of the teacher that played them; empty for the model that collects."""
    start: Literal["revision", "rollback"] = "revision"
    """Where a continuation starts: after a revision turn, or from before the first error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleAgreement:
    """The judge measured against an oracle that knows each step's true verdict.

    `precision` and `recall` are those of the class "bad", in [0, 1]; None when undefined.
    `first_error` is the share of pairs on whose bad path judge and oracle name the same first
    error, or both none.
    """

    accuracy: Estimate
    precision: float | None = None
    recall: float | None = None
    first_error: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRecord:
    """The record of the judge in an iteration. `verdicts` counts judged steps by verdict, including
    unparsable ones.
    """

    verdicts: Counts
    paths: int
    """Bad paths that were judged."""
    replies: int = 0
    unreadable: int = 0
    """Replies that hit the token limit within their thought, so that nothing in them counts."""
    model: str = ""
    """The judge's label; empty if the acting model judges."""
    no_error: int
    """Judged paths in which no step was found bad."""
    revision_lengths: Mapping[int, int] = field(default_factory=dict)
    """The number of spliced pairs by the place of the first error: 1 for the first step after the
    split, and so on; 0 for a step that both paths share.
    """
    oracle: OracleAgreement | None = None


# Agent-R's sections of a report, made from the records above.


def survival(record: SpliceSurvival | None) -> Section:
    """Return the section on how many splices survived; with None, it says that none was played."""
    title = "Splice survival"
    if record is None:
        reason = "splices were not played in the environment; the splice modes verified, continued and rollback do that"
        return not_measured("survival", title, reason)
    if record.tried == 0:
        return not_measured("survival", title, "there was no splice to play")
    text = (
        f"{wording.count(record.survived)} of {wording.count(record.tried)} splices "
        f"({wording.percent(record.survived / record.tried)}%) still reached the required reward, and not before the "
        f"{record.start}, when played live."
    )
    if record.continuations:
        who = f" by the teacher, {record.player}," if record.player else ""
        text += (
            f" Of {wording.count(record.continuations)} continuations{who} {wording.count(record.won)} "
            f"({wording.percent(record.won / record.continuations)}%) succeeded."
        )
    outcomes = {"survived": record.survived, **iteration.by_count(record.died)}
    return Section(
        "survival", title, (Paragraph(text), iteration.counts("Outcome", "Splices", outcomes, whole=record.tried))
    )


def judge(record: JudgeRecord | None) -> Section:
    """Return the section on the judge's verdicts; with None, it says that no judge was asked."""
    title = "Judge"
    if record is None:
        return not_measured("judge", title, "no judge was asked in this iteration")
    steps = sum(record.verdicts.values())
    rows = [
        _rate("Unparsable replies", record.verdicts.get("unparsable", 0), steps, "judged steps"),
        _rate("No error found", record.no_error, record.paths, "judged paths"),
    ]
    if record.unreadable:
        rows.insert(1, _rate("Cut within a thought", record.unreadable, record.replies, "replies"))
    rates = Table((Column("Rate", "text"), Column("%"), Column("Count"), Column("Of", "text")), tuple(rows))
    blocks: list[Block] = [iteration.counts("Verdict", "Steps", record.verdicts), rates]
    lengths = record.revision_lengths
    if any(lengths.values()):
        all_lengths = sorted(Counter(lengths).elements())
        caption = (
            f"Revision length: steps from the split to the first error. Mean {fmean(all_lengths):.1f}, median "
            f"{median_low(all_lengths)}, over {wording.count(len(all_lengths))} spliced pairs."
        )
        if shared_count := lengths.get(0, 0):
            caption += (
                f" In {wording.count(shared_count)} of them the first bad step is one that both paths share (0 steps), "
                "and the good path goes on after it."
            )
        counted_pairs = (Row((wording.count(steps), wording.count(count))) for steps, count in lengths.items())
        table = Table((Column("Steps to first error"), Column("Pairs")), tuple(counted_pairs))
        drawing = plots.histogram(lengths, "Steps from the split to the first error")
        blocks.append(Figure(drawing, caption, (Paragraph(caption), table)))
    else:
        blocks.append(Paragraph("Not measured: revision length; no spliced pair has a step judged bad."))
    if record.oracle:
        rows = [Row(("Verdict accuracy", *_estimate(record.oracle.accuracy)), "strong")]
        if record.oracle.first_error:
            rows.append(Row(("Same first error", *_estimate(record.oracle.first_error))))
        for name, share in (("Precision", record.oracle.precision), ("Recall", record.oracle.recall)):
            rows.append(Row((f"{name} of “bad”", wording.percent(share), wording.NOTHING, wording.NOTHING)))
        columns = (Column("Judge against oracle", "text"), Column("%"), Column("95% interval"), Column("n"))
        blocks.append(Table(columns, tuple(rows)))
    else:
        blocks.append(Paragraph("Not measured: accuracy against an oracle; none was given."))
    note = f"Verdicts of {record.model or 'the acting model'} on the steps of bad paths."
    return Section("judge", title, tuple(blocks), note)


def revision_samples(examples: tuple[RevisionExample, ...]) -> Section:
    """Return the section that shows samples turn by turn, or says that there are none."""
    title = "Revision samples"
    if not examples:
        return not_measured("samples", title, "this iteration made no revision sample")
    return Section("samples", title, (Transcripts(examples),), "Conversations exactly as they are trained on.")


def _estimate(estimate: Estimate) -> tuple[str, str, str]:
    return wording.percent(estimate.value), wording.interval(estimate), wording.count(estimate.n)


def _rate(name: str, part: int, total: int, unit: str) -> Row:
    return Row(
        (name, wording.percent(wording.share(part, total)), wording.count(part), f"{wording.count(total)} {unit}")
    )


# The judge, measured against the environment's oracle.


def agreement(place: Workplace, iteration: int) -> OracleAgreement | None:
    """Return how well the judge of an iteration agrees with the environments' oracles; None if no
    judged step has an oracle's verdict. Missing oracle verdicts are obtained and stored first.

    Each judged node counts once, even if several pairs share it. First errors are compared pair by
    pair, over the steps that the judge was shown.
    """
    verdicts = pair_verdicts(place.store, place.source_id(iteration))
    truth = ask_oracle(place, verdicts)
    labelled_rows = [(row, truth[row.tree_id, row.node]) for row in verdicts if (row.tree_id, row.node) in truth]
    if not labelled_rows:
        return None
    pairs = list({(row.tree_id, row.node): (row.verdict, true) for row, true in labelled_rows}.values())
    firsts: dict[str, list[tuple[int, Verdict, Verdict]]] = {}
    for row, true in labelled_rows:
        firsts.setdefault(row.pair_id, []).append((row.position, row.verdict, true))
    return OracleAgreement(
        accuracy=rate([verdict is true for verdict, true in pairs]),
        precision=_share([true is Verdict.BAD for verdict, true in pairs if verdict is Verdict.BAD]),
        recall=_share([verdict is Verdict.BAD for verdict, true in pairs if true is Verdict.BAD]),
        first_error=rate(
            [
                next((p for p, verdict, _ in steps if verdict is Verdict.BAD), None)
                == next((p for p, _, true in steps if true is Verdict.BAD), None)
                for steps in firsts.values()
            ]
        ),
    )


def rate(hits: list[bool]) -> Estimate:
    """Return the share of true values in `hits`, with its confidence interval."""
    return estimate(success_rate(hits))


def _share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


# The audit of the judge: whether it finds the first error where the value of the tree's nodes
# drops, and where the environment's oracle finds it.

TITLE = "Judge beside the tree's values"
_FARTHEST = 5
"""Distances of at least this many steps share the outermost bars."""
Witnesses = Callable[[PathAudit], tuple[int | None, int | None]]
# The tree's first error is measured from the mean value of the siblings, not from the best sibling,
# whose value is high by chance. Each function returns the two first errors to compare.
_COMPARED: dict[str, Witnesses] = {
    "judge and tree": lambda path: (path.judge, path.tree),
    "judge and oracle": lambda path: (path.judge, path.oracle),
    "tree and oracle": lambda path: (path.tree, path.oracle),
}


def audit(paths: Sequence[PathAudit], steps: Sequence[JudgedStep]) -> Section:
    """Return the section that compares the first errors that judge, tree and oracle name on judged
    paths; without paths, it says that none was judged.
    """
    if not paths:
        return not_measured("audit", TITLE, "no path was judged in this iteration")
    note = (
        "By the tree the first error is the step of a bad path that is worth least beside its siblings: the mean "
        "reward backed up through them, less its own. All witnesses look at the steps that the judge was shown; the "
        "first error is the same where they name the same step, or none. View v_critic_audit has each path."
    )
    comparisons = {name: pick for name, pick in _COMPARED.items() if _comparable(name, paths)}
    blocks: list[Block] = [_agreement(paths, comparisons)]
    if not any(path.has_oracle for path in paths):
        blocks.append(Paragraph("Not measured: the oracle's first errors; the environment has no oracle."))
    blocks += _distances(paths)
    rows = []
    for verdict in Verdict:
        judged_steps = [step for step in steps if step.verdict is verdict]
        drops = [step.value_drop for step in judged_steps if step.value_drop is not None]
        if judged_steps:
            cells = (
                wording.count(len(judged_steps)),
                wording.count(len(drops)),
                wording.signed(fmean(drops), 3) if drops else None,
                wording.percent(fmean(drop > 0 for drop in drops)) if drops else None,
            )
            rows.append(Row((str(verdict), *cells)))
    titles = ("Judged steps", "With siblings", "Mean value drop", "Worth less than siblings, %")
    blocks.append(Table((Column("Verdict", "text"), *map(Column, titles)), tuple(rows)))
    order = order_of_drops(steps)
    if order is not None:
        text = (
            f"A step judged bad lost more value than one judged good in {wording.percent(order)}% of all such pairs; "
            "50% would be chance."
        )
        blocks.append(Paragraph(text))
    depths = sorted({path.depth for path in paths}, key=lambda depth: (depth is None, depth or 0))
    if len(depths) > 1:
        rows = []
        for depth in depths:
            at_depth = [path for path in paths if path.depth == depth]
            name = "none" if depth is None else str(depth)
            rows.append(Row((name, wording.count(len(at_depth)), *_same(at_depth, comparisons))))
        same = (Column(f"Same: {name}, %") for name in comparisons)
        blocks.append(Table((Column("Depth", "text"), Column("Paths"), *same), tuple(rows)))
    return Section("audit", TITLE, tuple(blocks), note)


def audit_of_run(paths: Mapping[int, Sequence[PathAudit]]) -> Section:
    """Return the section of a run on how often judge, tree and oracle agree, by iteration.

    `paths` are the audited paths by iteration.
    """
    all_paths = [path for group in paths.values() for path in group]
    comparisons = {name: pick for name, pick in _COMPARED.items() if _comparable(name, all_paths)}
    rows = (
        Row((wording.iteration(number), wording.count(len(group)), *_same(group, comparisons)))
        for number, group in paths.items()
    )
    titles = (f"Same: {name}, %" for name in comparisons)
    table = Table((Column("Iteration", "text"), Column("Judged paths"), *map(Column, titles)), tuple(rows))
    note = "How often two witnesses name the same first error of a bad path, or both none; 95% intervals."
    return Section("audit-run", f"{TITLE} over the run", (table,), note)


def order_of_drops(steps: Sequence[JudgedStep]) -> float | None:
    """Return the probability that a random step judged bad has a larger value drop than a random
    step judged good, ties counting half: the area under the ROC curve (Hanley and McNeil 1982).
    None if there is no step of either kind.
    """
    bad, good = (
        sorted(step.value_drop for step in steps if step.verdict is verdict and step.value_drop is not None)
        for verdict in (Verdict.BAD, Verdict.GOOD)
    )
    if not bad or not good:
        return None
    return sum(bisect_left(good, drop) + bisect_right(good, drop) for drop in bad) / (2 * len(bad) * len(good))


def _comparable(name: str, paths: Sequence[PathAudit]) -> list[PathAudit]:
    return [path for path in paths if path.has_oracle] if "oracle" in name else list(paths)


def _agreement(paths: Sequence[PathAudit], comparisons: Mapping[str, Witnesses]) -> Table:
    titles = ("Same first error, %", "Within one step, %", "Mean distance, steps", "Both name one", "Paths")
    rows = []
    for name, pick in comparisons.items():
        pairs = [pick(path) for path in _comparable(name, paths)]
        same = rate([first == second for first, second in pairs])
        near = rate(
            [
                first == second or (first is not None and second is not None and abs(first - second) < 2)
                for first, second in pairs
            ]
        )
        distances = [first - second for first, second in pairs if first is not None and second is not None]
        cells = (
            wording.estimate_text(same),
            wording.estimate_text(near),
            wording.signed(fmean(distances)) if distances else None,
            wording.count(len(distances)),
            wording.count(len(pairs)),
        )
        rows.append(Row((name, *cells)))
    return Table((Column("Witnesses", "text"), *map(Column, titles)), tuple(rows))


def _distances(paths: Sequence[PathAudit]) -> Iterator[Block]:
    distances = [path.judge - path.tree for path in paths if path.judge is not None and path.tree is not None]
    if not distances:
        yield Paragraph("Not measured: distances; on no path do both the judge and the tree name an error.")
        return
    histogram = Counter(max(-_FARTHEST, min(_FARTHEST, steps)) for steps in distances)
    beyond = {-_FARTHEST: "\N{LESS-THAN OR EQUAL TO}", _FARTHEST: "\N{GREATER-THAN OR EQUAL TO}"}
    counts = {
        f"{beyond.get(steps, '')}{wording.signed(steps, 0)}": histogram[steps]
        for steps in range(min(histogram), max(histogram) + 1)
    }
    caption = (
        "Steps by which the judge sees the first error later than the tree (left of 0: earlier), "
        f"on {wording.count(len(distances))} paths."
    )
    instead = iteration.counts("Steps later", "Paths", counts)
    yield Figure(
        plots.bars(counts, "Paths by distance of the judge's first error from the tree's"),
        caption,
        (Paragraph(caption), instead),
    )


def _same(paths: Sequence[PathAudit], comparisons: Mapping[str, Witnesses]) -> Iterator[EstimateText | None]:
    """Yield, for each comparison, how often both name the same first error, or both none; None if
    there is no path to compare.
    """
    for name, pick in comparisons.items():
        pairs = [pick(path) for path in _comparable(name, paths)]
        same = rate([first == second for first, second in pairs]) if pairs else None
        yield None if same is None else wording.estimate_text(same)


# Revision samples as the report shows them: each turn with its part, its verdict, and its train
# flag.


def examples(place: Workplace, iteration: int, *, count: int) -> tuple[RevisionExample, ...]:
    """Return up to `count` revision samples from an iteration's dataset, drawn at random with the
    recipe's seed.
    """
    rows = trained_revisions(place.store, place.iteration_id(iteration))
    rng = random.Random(derive_seed(place.recipe.seed, "examples", iteration))
    pair_ids = dict(rng.sample(rows, min(count, len(rows))))
    samples = load_samples(place.store, list(pair_ids))
    critiques = load_critiques(place.store, [pair for pair in pair_ids.values() if pair])
    most = place.recipe.agent_r.quote_chars
    revisions = []
    for key, sample in samples.items():
        origin = sample.provenance
        live = origin.extra.get("live_reward")
        revisions.append(
            RevisionExample(
                sample_id=key,
                instance=sample.instance.key if sample.instance else "",
                tree_id=origin.tree_id,
                good_reward=origin.good_reward or 0.0,
                bad_reward=origin.bad_reward or 0.0,
                split=origin.split or 0,
                cut=origin.cut or 0,
                turns=_turns(sample, critiques.get(pair_ids[key] or ""), most),
                live_reward=None if live is None else float(live),
                diagnosis=_quoted(str(origin.extra.get("diagnosis", "")), most),
            )
        )
    return tuple(revisions)


def _turns(sample: Sample, critique: Critique | None, most: int) -> tuple[Turn, ...]:
    split, cut = sample.provenance.split or 0, sample.provenance.cut or 0
    verdicts: dict[int, StepVerdict] = {v.position: v for v in critique.verdicts} if critique else {}
    first_error = critique.first_error if critique else None
    turns = []
    drop_count = int(sample.provenance.extra.get("dropped", 0))
    is_rollback = sample.provenance.extra.get("mode") == "rollback"
    for number, role, message in _numbered(sample):
        # The turns that a window dropped came directly after the first reply.
        position = (number - OPENING + 2 * drop_count * (number > OPENING)) // 2
        reply = role == "assistant" and number >= OPENING
        verdict = verdicts.get(position) if reply and position < cut else None
        turns.append(
            Turn(
                role=role,
                text=_quoted(message.text, most),
                part="good" if is_rollback and position >= cut else _part(number, position, split, cut),
                train=message.train,
                first_error=reply and position == first_error and position < cut,
                verdict=str(verdict.verdict) if verdict else "",
                judge_reply=_quoted(verdict.reply, most) if verdict else "",
            )
        )
    return tuple(turns)


def _quoted(text: str, most: int) -> str:
    excess = len(text) - most
    return text if excess <= 0 else f"{text[:most]}\n[... {counted(excess, 'character')} more]"


def _numbered(sample: Sample) -> Iterator[tuple[int, Role, Message | Span]]:
    """Yield (number, role, turn) for each turn of a sample; the first reply has number `OPENING`.

    From there on each reply has one number and all turns between it and the next reply share the
    following number. The spans of a grown turn are numbered in the same way.
    """
    # Turns before the usual opening, such as a system turn and examples, have negative numbers.
    grown = any(message.spans for message in sample.messages)
    examples = sum(message.example for message in sample.messages)
    before = examples if grown else opening_length(sample.messages) - OPENING
    replies = 0
    for number, message in enumerate(sample.messages, start=-before):
        if message.spans:
            for place, span in enumerate(message.spans):
                yield OPENING + place, "user" if place % 2 else "assistant", span
        elif number < OPENING:
            yield number, message.role, message
        else:
            replies += message.role == "assistant"
            yield OPENING + 2 * replies - (1 if message.role != "assistant" else 2), message.role, message


def _part(number: int, position: int, split: int, cut: int) -> TurnPart:
    if number < OPENING:
        return "opening"
    if position >= cut:
        return "revision" if position == cut else "good"
    # The cut may lie in the shared steps, so the turns from the cut on are tested first, above.
    return "shared" if position < split else "bad"


_DIED = ("verify-", "no-try-", "no-gain", "ended-at-revision-turn")
"""The beginnings of the rejection reasons of splices that were played."""


def tree_funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the funnel from trees to trained rows, a count for each stage; () before the iteration
    has begun.
    """
    source, iteration_id = place.source_id(iteration), place.iteration_id(iteration)
    counts = datasets.tree_counts(place.store, source)
    if counts is None or iteration_state(place.store, iteration_id) is None:
        return ()
    rejections = rejected_by(place, source, "splice")
    failures = {reason: count for reason, count in rejections.items() if reason.startswith("verify-")}
    other_rejections = {reason: count for reason, count in rejections.items() if reason not in failures}
    stages = [
        FunnelStage(name="trees", count=counts.trees),
        *([FunnelStage(name="after the expert's steps", count=counts.led)] if counts.led else []),
        FunnelStage(name="ended paths", count=counts.paths),
        FunnelStage(name="candidate pairs", count=counts.pairs, rejected=rejected_by(place, source, "pairs")),
        FunnelStage(name="judged", count=counts.critiques),
        FunnelStage(name="spliced", count=counts.spliced, rejected=other_rejections),
        FunnelStage(name="verified", count=counts.verified, rejected=failures),
    ]
    if place.recipe.splice.mode != "verified":
        stages.pop()
    if place.recipe.data.use == "both+expert":
        stages.append(expert_episodes(place, iteration))
    return to_rows(place, iteration, stages)


def revision_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the sections on splices, on the judge and on its audit; () if the iteration has no
    search.
    """
    if not _searches(place, iteration):
        return ()
    record = judge_record(place, iteration)
    splice_survival: SpliceSurvival | None = None
    if place.recipe.splice.mode == "verified" or place.recipe.splice.goes_on:
        rejections = datasets.rejection_counts(place.store, place.source_id(iteration)).get("splice", {})
        splice_survival = survival_of(datasets.count_revised_pairs(place.store, place.source_id(iteration)), rejections)
    if splice_survival is not None and place.recipe.splice.goes_on:
        teacher = place.recipe.models.teacher if place.recipe.splice.continuation.by == "teacher" else None
        continuations, wins = datasets.count_continuations(place.store, place.source_id(iteration))
        splice_survival = replace(
            splice_survival,
            continuations=continuations,
            won=wins,
            player=teacher.label if teacher else "",
            start="rollback" if place.recipe.splice.mode == "rollback" else "revision",
        )
    # Read after the judge's record, which asks the oracle for missing verdicts.
    source = place.source_id(iteration)
    return (
        survival(splice_survival),
        judge(record),
        audit(trees.path_audits(place.store, source), trees.judged_steps(place.store, source)),
    )


def run_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on the judge in iterations 1 to `iteration`; () if it judged no path."""
    by_iteration = {
        number: trees.path_audits(place.store, place.source_id(number))
        for number in range(1, iteration + 1)
        if _searches(place, number)
    }
    judged_paths = {number: paths for number, paths in by_iteration.items() if paths}
    return (audit_of_run(judged_paths),) if judged_paths else ()


def sample_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section with some revision samples that were trained on; () if the iteration has
    no search.
    """
    if not _searches(place, iteration):
        return ()
    return (revision_samples(examples(place, iteration, count=5)),)


def survival_of(survivors: int, rejections: Mapping[str, int]) -> SpliceSurvival:
    """Return how many splices were played, and how many survived or were rejected.

    Args:
        survivors: the number of splices that became samples.
        rejections: the number of rejected splices by reason; those rejected before they were
            played do not count.
    """
    failures = {reason: count for reason, count in rejections.items() if reason.startswith(_DIED)}
    return SpliceSurvival(tried=survivors + sum(failures.values()), survived=survivors, died=failures)


def judge_record(place: Workplace, iteration: int) -> JudgeRecord | None:
    """Return the record of an iteration's judge; None if it gave no verdict."""
    source = place.source_id(iteration)
    verdicts = trees.verdict_counts(place.store, source)
    if not verdicts:
        return None
    errors = trees.first_errors(place.store, source)
    replies, unreadable = runs.unreadable_replies(place.store, source).get("judge", (0, 0))
    return JudgeRecord(
        verdicts=verdicts,
        paths=len(errors),
        replies=replies,
        unreadable=unreadable,
        model=place.recipe.models.judge.label if place.recipe.models.judge else "",
        no_error=errors.count(None),
        revision_lengths=trees.revision_lengths(place.store, source),
        oracle=agreement(place, iteration),
    )


def _searches(place: Workplace, iteration: int) -> bool:
    return place.recipe.data.use != "expert" and not place.plan(iteration).phase
