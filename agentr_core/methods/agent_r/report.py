"""Agent-R's part of a report, read from the store."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low
from typing import Literal

from agentr_core.episodes.transcript import NUM_OPENING_TURNS, opening_length
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
    unmeasured_section,
)
from agentr_core.runtime.context import RunContext
from agentr_core.samples.dataset import is_rollback
from agentr_core.stages.report import count_rejections, expert_episodes, report_estimate, with_row_counts
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_critiques
from agentr_core.store.queries import datasets, runs, trees
from agentr_core.store.queries.datasets import trained_revisions
from agentr_core.store.queries.runs import iteration_state
from agentr_core.store.queries.trees import JudgedStep, PathAudit, pair_verdicts
from agentr_core.texts import count_text
from agentr_core.types import Critique, Message, Role, Sample, Span, StepVerdict, Verdict

# The numbers that a report has about judged paths and spliced revisions, read from the store.


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceSurvival:
    """How many splices were played in the environment (`num_played`), and how many of them cleared
    alpha and gained reward after the revision (`num_survived`); `num_rejected_by_reason` counts the
    others by reason.
    """

    num_played: int
    num_survived: int
    num_rejected_by_reason: Counts = field(default_factory=dict)
    num_continuations: int = 0
    """The number of episodes in which a model went on from a bad path."""
    num_won: int = 0
    """The number of continuations that succeeded."""
    player_label: str = ""
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
    """The record of the judge in an iteration. `num_steps_by_verdict` counts judged steps by
    verdict, including unparsable ones.
    """

    num_steps_by_verdict: Counts
    num_pairs: int
    """Pairs whose bad path was judged; pairs may share one."""
    num_replies: int = 0
    num_unreadable: int = 0
    """Replies that hit the token limit within their thought, so that nothing in them counts."""
    model_label: str = ""
    """The judge's label; empty if the acting model judges."""
    num_without_error: int
    """Those in which no step was found bad."""
    num_pairs_by_length: Mapping[int, int] = field(default_factory=dict)
    """The number of spliced pairs by the place of the first error: 1 for the first step after the
    split, and so on; 0 for a step that both paths share.
    """
    oracle: OracleAgreement | None = None


# Agent-R's sections of a report, made from the records above.


def survival_section(record: SpliceSurvival | None) -> Section:
    """Return the section on how many splices survived; with None, it says that none was played."""
    title = "Splice survival"
    if record is None:
        reason = "splices were not played in the environment; the splice modes verified, continued and rollback do that"
        return unmeasured_section("survival", title, reason)
    if record.num_played == 0:
        return unmeasured_section("survival", title, "there was no splice to play")
    text = (
        f"{wording.count(record.num_survived)} of {wording.count(record.num_played)} splices "
        f"({wording.percent(record.num_survived / record.num_played)}%) still reached the required reward, and "
        f"not before the {record.start}, when played live."
    )
    if record.num_continuations:
        who = f" by the teacher, {record.player_label}," if record.player_label else ""
        text += (
            f" Of {wording.count(record.num_continuations)} continuations{who} {wording.count(record.num_won)} "
            f"({wording.percent(record.num_won / record.num_continuations)}%) succeeded."
        )
    outcomes = {"survived": record.num_survived, **iteration.sorted_by_count(record.num_rejected_by_reason)}
    return Section(
        "survival",
        title,
        (Paragraph(text), iteration.counts_table("Outcome", "Splices", outcomes, num_all=record.num_played)),
    )


def judge_section(record: JudgeRecord | None) -> Section:
    """Return the section on the judge's verdicts; with None, it says that no judge was asked."""
    title = "Judge"
    if record is None:
        return unmeasured_section("judge", title, "no judge was asked in this iteration")
    num_steps = sum(record.num_steps_by_verdict.values())
    rows = [
        _rate_row("Unparsable replies", record.num_steps_by_verdict.get("unparsable", 0), num_steps, "judged steps"),
        _rate_row("No error found", record.num_without_error, record.num_pairs, "judged pairs"),
    ]
    if record.num_unreadable:
        rows.insert(1, _rate_row("Cut within a thought", record.num_unreadable, record.num_replies, "replies"))
    rates = Table((Column("Rate", "text"), Column("%"), Column("Count"), Column("Of", "text")), tuple(rows))
    blocks: list[Block] = [iteration.counts_table("Verdict", "Steps", record.num_steps_by_verdict), rates]
    num_pairs_by_length = record.num_pairs_by_length
    if any(num_pairs_by_length.values()):
        all_lengths = sorted(Counter(num_pairs_by_length).elements())
        caption = (
            f"Revision length: steps from the split to the first error. Mean {fmean(all_lengths):.1f}, median "
            f"{median_low(all_lengths)}, over {wording.count(len(all_lengths))} spliced pairs."
        )
        if num_shared := num_pairs_by_length.get(0, 0):
            caption += (
                f" In {wording.count(num_shared)} of them the first bad step is one that both paths share (0 steps), "
                "and the good path goes on after it."
            )
        counted_pairs = (
            Row((wording.count(num_steps), wording.count(count))) for num_steps, count in num_pairs_by_length.items()
        )
        table = Table((Column("Steps to first error"), Column("Pairs")), tuple(counted_pairs))
        drawing = plots.histogram(num_pairs_by_length, "Steps from the split to the first error")
        blocks.append(Figure(drawing, caption, (Paragraph(caption), table)))
    else:
        blocks.append(Paragraph("Not measured: revision length; no spliced pair has a step judged bad."))
    if record.oracle:
        rows = [Row(("Verdict accuracy", *_estimate_cells(record.oracle.accuracy)), "strong")]
        if record.oracle.first_error:
            rows.append(Row(("Same first error", *_estimate_cells(record.oracle.first_error))))
        for name, share in (("Precision", record.oracle.precision), ("Recall", record.oracle.recall)):
            rows.append(Row((f"{name} of “bad”", wording.percent(share), wording.NOTHING, wording.NOTHING)))
        columns = (Column("Judge against oracle", "text"), Column("%"), Column("95% interval"), Column("n"))
        blocks.append(Table(columns, tuple(rows)))
    else:
        blocks.append(Paragraph("Not measured: accuracy against an oracle; none was given."))
    note = f"Verdicts of {record.model_label or 'the acting model'} on the steps of bad paths."
    return Section("judge", title, tuple(blocks), note)


def revision_samples_section(examples: tuple[RevisionExample, ...]) -> Section:
    """Return the section that shows samples turn by turn, or says that there are none."""
    title = "Revision samples"
    if not examples:
        return unmeasured_section("samples", title, "this iteration made no revision sample")
    return Section("samples", title, (Transcripts(examples),), "Conversations exactly as they are trained on.")


def _estimate_cells(estimate: Estimate) -> tuple[str, str, str]:
    return wording.percent(estimate.value), wording.interval(estimate), wording.count(estimate.n)


def _rate_row(name: str, part: int, total: int, unit: str) -> Row:
    return Row(
        (name, wording.percent(wording.share(part, total)), wording.count(part), f"{wording.count(total)} {unit}")
    )


# The judge, measured against the environment's oracle.


def oracle_agreement(ctx: RunContext, iteration: int) -> OracleAgreement | None:
    """Return how well the judge of an iteration agrees with the environments' oracles; None if no
    judged step has an oracle's verdict. Missing oracle verdicts are obtained and stored first.

    Each judged node counts once, even if several pairs share it. First errors are compared pair by
    pair, over the steps that the judge was shown.
    """
    verdicts = pair_verdicts(ctx.store, ctx.source_id(iteration))
    truth = ask_oracle(ctx, verdicts)
    labelled_rows = [(row, truth[row.tree_id, row.node]) for row in verdicts if (row.tree_id, row.node) in truth]
    if not labelled_rows:
        return None
    verdict_pairs = list(
        {(row.tree_id, row.node): (row.verdict, true_verdict) for row, true_verdict in labelled_rows}.values()
    )
    true_verdicts_by_pair: dict[str, list[tuple[int, Verdict]]] = {}
    for row, true_verdict in labelled_rows:
        true_verdicts_by_pair.setdefault(row.pair_id, []).append((row.position, true_verdict))
    # As stored: `critique.unparsable` may let an unparsable verdict be the first error.
    critiques = load_critiques(ctx.store, list(true_verdicts_by_pair))
    return OracleAgreement(
        accuracy=rate_estimate([verdict is true_verdict for verdict, true_verdict in verdict_pairs]),
        precision=_share(
            [true_verdict is Verdict.BAD for verdict, true_verdict in verdict_pairs if verdict is Verdict.BAD]
        ),
        recall=_share(
            [verdict is Verdict.BAD for verdict, true_verdict in verdict_pairs if true_verdict is Verdict.BAD]
        ),
        first_error=rate_estimate(
            [
                critiques[pair_id].first_error
                == min((position for position, verdict in true_verdicts if verdict is Verdict.BAD), default=None)
                for pair_id, true_verdicts in true_verdicts_by_pair.items()
                if pair_id in critiques
            ]
        ),
    )


def rate_estimate(hits: list[bool]) -> Estimate:
    """Return the share of true values in `hits`, with its confidence interval."""
    return report_estimate(success_rate(hits))


def _share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


# The audit of the judge: whether it finds the first error where the value of the tree's nodes
# drops, and where the environment's oracle finds it.

TITLE = "Judge beside the tree's values"
_MAX_DISTANCE = 5
"""Distances of at least this many steps share the outermost bars."""
FirstErrorPicker = Callable[[PathAudit], tuple[int | None, int | None]]
# The tree's first error is measured from the mean value of the siblings, not from the best sibling,
# whose value is high by chance. Each function returns the two first errors to compare.
_COMPARISONS: dict[str, FirstErrorPicker] = {
    "judge and tree": lambda path: (path.judge_error, path.tree_error),
    "judge and oracle": lambda path: (path.judge_error, path.oracle_error),
    "tree and oracle": lambda path: (path.tree_error, path.oracle_error),
}


def audit_section(paths: Sequence[PathAudit], steps: Sequence[JudgedStep]) -> Section:
    """Return the section that compares the first errors that judge, tree and oracle name on judged
    paths; without paths, it says that none was judged.
    """
    if not paths:
        return unmeasured_section("audit", TITLE, "no path was judged in this iteration")
    note = (
        "By the tree the first error is the step of a bad path that is worth least beside its siblings: the mean "
        "reward backed up through them, less its own. All witnesses look at the steps that the judge was shown; the "
        "first error is the same where they name the same step, or none. View v_critic_audit has each path."
    )
    comparisons = {name: pick for name, pick in _COMPARISONS.items() if _comparable_paths(name, paths)}
    blocks: list[Block] = [_agreement_table(paths, comparisons)]
    if not any(path.has_oracle for path in paths):
        blocks.append(Paragraph("Not measured: the oracle's first errors; the environment has no oracle."))
    blocks += _distance_blocks(paths)
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
    auc = auc_of_drops(steps)
    if auc is not None:
        text = (
            f"A step judged bad lost more value than one judged good in {wording.percent(auc)}% of all such pairs; "
            "50% would be chance."
        )
        blocks.append(Paragraph(text))
    depths = sorted({path.depth for path in paths}, key=lambda depth: (depth is None, depth or 0))
    if len(depths) > 1:
        rows = []
        for depth in depths:
            at_depth = [path for path in paths if path.depth == depth]
            name = "none" if depth is None else str(depth)
            rows.append(Row((name, wording.count(len(at_depth)), *_agreement_cells(at_depth, comparisons))))
        share_columns = (Column(f"Same: {name}, %") for name in comparisons)
        blocks.append(Table((Column("Depth", "text"), Column("Paths"), *share_columns), tuple(rows)))
    return Section("audit", TITLE, tuple(blocks), note)


def run_audit_section(paths_by_iteration: Mapping[int, Sequence[PathAudit]]) -> Section:
    """Return the section of a run on how often judge, tree and oracle agree, by iteration.

    `paths_by_iteration` are the audited paths by iteration.
    """
    all_paths = [path for iteration_paths in paths_by_iteration.values() for path in iteration_paths]
    comparisons = {name: pick for name, pick in _COMPARISONS.items() if _comparable_paths(name, all_paths)}
    rows = (
        Row(
            (
                wording.iteration_name(number),
                wording.count(len(iteration_paths)),
                *_agreement_cells(iteration_paths, comparisons),
            )
        )
        for number, iteration_paths in paths_by_iteration.items()
    )
    titles = (f"Same: {name}, %" for name in comparisons)
    table = Table((Column("Iteration", "text"), Column("Judged paths"), *map(Column, titles)), tuple(rows))
    note = "How often two witnesses name the same first error of a bad path, or both none; 95% intervals."
    return Section("audit-run", f"{TITLE} over the run", (table,), note)


def auc_of_drops(steps: Sequence[JudgedStep]) -> float | None:
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


def _comparable_paths(name: str, paths: Sequence[PathAudit]) -> list[PathAudit]:
    return [path for path in paths if path.has_oracle] if "oracle" in name else list(paths)


def _agreement_table(paths: Sequence[PathAudit], comparisons: Mapping[str, FirstErrorPicker]) -> Table:
    titles = ("Same first error, %", "Within one step, %", "Mean distance, steps", "Both name one", "Paths")
    rows = []
    for name, pick in comparisons.items():
        pairs = [pick(path) for path in _comparable_paths(name, paths)]
        same_rate = rate_estimate([first == second for first, second in pairs])
        near_rate = rate_estimate(
            [
                first == second or (first is not None and second is not None and abs(first - second) < 2)
                for first, second in pairs
            ]
        )
        distances = [first - second for first, second in pairs if first is not None and second is not None]
        cells = (
            wording.estimate_text(same_rate),
            wording.estimate_text(near_rate),
            wording.signed(fmean(distances)) if distances else None,
            wording.count(len(distances)),
            wording.count(len(pairs)),
        )
        rows.append(Row((name, *cells)))
    return Table((Column("Witnesses", "text"), *map(Column, titles)), tuple(rows))


def _distance_blocks(paths: Sequence[PathAudit]) -> Iterator[Block]:
    distances = [
        path.judge_error - path.tree_error
        for path in paths
        if path.judge_error is not None and path.tree_error is not None
    ]
    if not distances:
        yield Paragraph("Not measured: distances; on no path do both the judge and the tree name an error.")
        return
    histogram = Counter(max(-_MAX_DISTANCE, min(_MAX_DISTANCE, steps)) for steps in distances)
    prefixes_at_ends = {-_MAX_DISTANCE: "\N{LESS-THAN OR EQUAL TO}", _MAX_DISTANCE: "\N{GREATER-THAN OR EQUAL TO}"}
    counts = {
        f"{prefixes_at_ends.get(steps, '')}{wording.signed(steps, 0)}": histogram[steps]
        for steps in range(min(histogram), max(histogram) + 1)
    }
    caption = (
        "Steps by which the judge sees the first error later than the tree (left of 0: earlier), "
        f"on {wording.count(len(distances))} paths."
    )
    table = iteration.counts_table("Steps later", "Paths", counts)
    yield Figure(
        plots.bars(counts, "Paths by distance of the judge's first error from the tree's"),
        caption,
        (Paragraph(caption), table),
    )


def _agreement_cells(
    paths: Sequence[PathAudit], comparisons: Mapping[str, FirstErrorPicker]
) -> Iterator[EstimateText | None]:
    """Yield, for each comparison, how often both name the same first error, or both none; None if
    there is no path to compare.
    """
    for name, pick in comparisons.items():
        pairs = [pick(path) for path in _comparable_paths(name, paths)]
        same_rate = rate_estimate([first == second for first, second in pairs]) if pairs else None
        yield None if same_rate is None else wording.estimate_text(same_rate)


# Revision samples as the report shows them: each turn with its part, its verdict, and its train
# flag.


def revision_examples(ctx: RunContext, iteration: int, *, max_examples: int) -> tuple[RevisionExample, ...]:
    """Return up to `max_examples` revision samples from an iteration's dataset, drawn at random
    with the recipe's seed.
    """
    rows = trained_revisions(ctx.store, ctx.iteration_id(iteration))
    rng = random.Random(derive_seed(ctx.recipe.seed, "examples", iteration))
    pair_ids = dict(rng.sample(rows, min(max_examples, len(rows))))
    samples = load_samples(ctx.store, list(pair_ids))
    critiques = load_critiques(ctx.store, [pair for pair in pair_ids.values() if pair])
    max_chars = ctx.recipe.agent_r.quote_chars
    revisions = []
    for sample_id, sample in samples.items():
        provenance = sample.provenance
        live_reward = provenance.extra.get("live_reward")
        revisions.append(
            RevisionExample(
                sample_id=sample_id,
                instance=sample.instance.key if sample.instance else "",
                tree_id=provenance.tree_id,
                good_reward=provenance.good_reward or 0.0,
                bad_reward=provenance.bad_reward or 0.0,
                split=provenance.split or 0,
                cut=provenance.cut or 0,
                turns=_example_turns(sample, critiques.get(pair_ids[sample_id] or ""), max_chars),
                live_reward=None if live_reward is None else float(live_reward),
                diagnosis=_quoted(str(provenance.extra.get("diagnosis", "")), max_chars),
            )
        )
    return tuple(revisions)


def _example_turns(sample: Sample, critique: Critique | None, max_chars: int) -> tuple[Turn, ...]:
    split, cut = sample.provenance.split or 0, sample.provenance.cut or 0
    verdicts: dict[int, StepVerdict] = {v.position: v for v in critique.verdicts} if critique else {}
    first_error = critique.first_error if critique else None
    turns = []
    num_dropped = int(sample.provenance.extra.get("dropped", 0))
    has_no_revision = is_rollback(sample)
    for number, role, message in _numbered_turns(sample):
        # The turns that a window dropped came directly after the first reply.
        position = (number - NUM_OPENING_TURNS + 2 * num_dropped * (number > NUM_OPENING_TURNS)) // 2
        is_reply = role == "assistant" and number >= NUM_OPENING_TURNS
        verdict = verdicts.get(position) if is_reply and position < cut else None
        turns.append(
            Turn(
                role=role,
                text=_quoted(message.text, max_chars),
                part="good" if has_no_revision and position >= cut else _part_of_turn(number, position, split, cut),
                train=message.train,
                first_error=is_reply and position == first_error and position < cut,
                verdict=str(verdict.verdict) if verdict else "",
                judge_reply=_quoted(verdict.reply, max_chars) if verdict else "",
            )
        )
    return tuple(turns)


def _quoted(text: str, max_chars: int) -> str:
    num_excess = len(text) - max_chars
    return text if num_excess <= 0 else f"{text[:max_chars]}\n[... {count_text(num_excess, 'character')} more]"


def _numbered_turns(sample: Sample) -> Iterator[tuple[int, Role, Message | Span]]:
    """Yield (number, role, turn) for each turn of a sample; the first reply has number
    `NUM_OPENING_TURNS`.

    From there on each reply has one number and all turns between it and the next reply share the
    following number. The spans of a grown turn are numbered in the same way.
    """
    # Turns before the usual opening, such as a system turn and examples, have negative numbers.
    has_grown_turn = any(message.spans for message in sample.messages)
    num_examples = sum(message.example for message in sample.messages)
    num_before = num_examples if has_grown_turn else opening_length(sample.messages) - NUM_OPENING_TURNS
    num_replies = 0
    for number, message in enumerate(sample.messages, start=-num_before):
        if message.spans:
            for position, span in enumerate(message.spans):
                yield NUM_OPENING_TURNS + position, "user" if position % 2 else "assistant", span
        elif number < NUM_OPENING_TURNS:
            yield number, message.role, message
        else:
            num_replies += message.role == "assistant"
            yield NUM_OPENING_TURNS + 2 * num_replies - (1 if message.role != "assistant" else 2), message.role, message


def _part_of_turn(number: int, position: int, split: int, cut: int) -> TurnPart:
    if number < NUM_OPENING_TURNS:
        return "opening"
    if position >= cut:
        return "revision" if position == cut else "good"
    # The cut may lie in the shared steps, so the turns from the cut on are tested first, above.
    return "shared" if position < split else "bad"


_PLAYED_REJECTIONS = ("verify-", "no-try-", "no-gain", "ended-at-revision-turn")
"""The beginnings of the rejection reasons of splices that were played."""


def tree_funnel(ctx: RunContext, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the funnel from trees to trained rows, a count for each stage; () before the iteration
    has begun.
    """
    source, iteration_id = ctx.source_id(iteration), ctx.iteration_id(iteration)
    counts = datasets.tree_counts(ctx.store, source)
    if counts is None or iteration_state(ctx.store, iteration_id) is None:
        return ()
    rejections = count_rejections(ctx, source, "splice")
    num_failed_by_reason = {reason: count for reason, count in rejections.items() if reason.startswith("verify-")}
    num_other_by_reason = {reason: count for reason, count in rejections.items() if reason not in num_failed_by_reason}
    stages = [
        FunnelStage(name="trees", count=counts.trees),
        *([FunnelStage(name="after the expert's steps", count=counts.led)] if counts.led else []),
        FunnelStage(name="ended paths", count=counts.paths),
        FunnelStage(
            name="candidate pairs", count=counts.pairs, rejected_by_reason=count_rejections(ctx, source, "pairs")
        ),
        FunnelStage(name="judged", count=counts.critiques),
        FunnelStage(name="spliced", count=counts.spliced, rejected_by_reason=num_other_by_reason),
        FunnelStage(name="verified", count=counts.verified, rejected_by_reason=num_failed_by_reason),
    ]
    if ctx.recipe.splice.mode != "verified":
        stages.pop()
    if ctx.recipe.data.use == "both+expert":
        stages.append(expert_episodes(ctx, iteration))
    return with_row_counts(ctx, iteration, stages)


def revision_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the sections on splices, on the judge and on its audit; () if the iteration has no
    search.
    """
    if not _has_search(ctx, iteration):
        return ()
    record = judge_record(ctx, iteration)
    splice_survival: SpliceSurvival | None = None
    if ctx.recipe.splice.mode == "verified" or ctx.recipe.splice.goes_on:
        rejections = datasets.rejection_counts(ctx.store, ctx.source_id(iteration)).get("splice", {})
        splice_survival = survival_of(datasets.count_revised_pairs(ctx.store, ctx.source_id(iteration)), rejections)
    if splice_survival is not None and ctx.recipe.splice.goes_on:
        teacher = ctx.recipe.models.teacher if ctx.recipe.splice.continuation.by == "teacher" else None
        num_continuations, num_won = datasets.count_continuations(ctx.store, ctx.source_id(iteration))
        splice_survival = replace(
            splice_survival,
            num_continuations=num_continuations,
            num_won=num_won,
            player_label=teacher.label if teacher else "",
            start="rollback" if ctx.recipe.splice.mode == "rollback" else "revision",
        )
    # Read after the judge's record, which asks the oracle for missing verdicts.
    source = ctx.source_id(iteration)
    return (
        survival_section(splice_survival),
        judge_section(record),
        audit_section(trees.path_audits(ctx.store, source), trees.judged_steps(ctx.store, source)),
    )


def run_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on the judge in iterations 1 to `iteration`; () if it judged no path."""
    paths_by_iteration = {
        number: trees.path_audits(ctx.store, ctx.source_id(number))
        for number in range(1, iteration + 1)
        if _has_search(ctx, number)
    }
    judged_paths = {number: paths for number, paths in paths_by_iteration.items() if paths}
    return (run_audit_section(judged_paths),) if judged_paths else ()


def sample_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section with some revision samples that were trained on; () if the iteration has
    no search.
    """
    if not _has_search(ctx, iteration):
        return ()
    return (revision_samples_section(revision_examples(ctx, iteration, max_examples=5)),)


def survival_of(num_survived: int, num_rejected_by_reason: Mapping[str, int]) -> SpliceSurvival:
    """Return how many splices were played, and how many survived or were rejected.

    Args:
        num_survived: the number of splices that became samples.
        num_rejected_by_reason: the number of rejected splices by reason; those rejected before they
            were played do not count.
    """
    num_failed_by_reason = {
        reason: count for reason, count in num_rejected_by_reason.items() if reason.startswith(_PLAYED_REJECTIONS)
    }
    return SpliceSurvival(
        num_played=num_survived + sum(num_failed_by_reason.values()),
        num_survived=num_survived,
        num_rejected_by_reason=num_failed_by_reason,
    )


def judge_record(ctx: RunContext, iteration: int) -> JudgeRecord | None:
    """Return the record of an iteration's judge; None if it gave no verdict."""
    source = ctx.source_id(iteration)
    verdicts = trees.verdict_counts(ctx.store, source)
    if not verdicts:
        return None
    first_errors = trees.first_errors(ctx.store, source)
    num_replies, num_unreadable = runs.unreadable_reply_counts(ctx.store, source).get("judge", (0, 0))
    return JudgeRecord(
        num_steps_by_verdict=verdicts,
        num_pairs=len(first_errors),
        num_replies=num_replies,
        num_unreadable=num_unreadable,
        model_label=ctx.recipe.models.judge.label if ctx.recipe.models.judge else "",
        num_without_error=first_errors.count(None),
        num_pairs_by_length=trees.revision_lengths(ctx.store, source),
        oracle=oracle_agreement(ctx, iteration),
    )


def _has_search(ctx: RunContext, iteration: int) -> bool:
    return ctx.recipe.data.use != "expert" and not ctx.plan(iteration).phase
