"""ETO's sections of a report, made from the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from agentr_core.methods.catalogue import DEMONSTRATE, EXPLORE, PREFER
from agentr_core.methods.eto.preferences import STAGE
from agentr_core.reports import iteration, plots, wording
from agentr_core.reports.document import Block, Column, Counts, Figure, FunnelStage, Paragraph, Row, Section, Table
from agentr_core.runtime.context import RunContext
from agentr_core.stages.report import count_rejections, expert_episodes, with_row_counts
from agentr_core.store.queries import datasets
from agentr_core.store.queries.datasets import PreferenceTrainingStep, preference_counts, preference_training_steps
from agentr_core.types import PreferenceCase

# The part of a report about preference pairs: how many there are, how far apart their sides are,
# and how training on them went.

TITLE = "Preference pairs"
_NUM_LAST_STEPS = 5
"""The number of last optimizer steps whose mean stands for the end of a training."""
_CASES: Final[Mapping[str, str]] = {
    PreferenceCase.LOSE: "the policy got less than the expert",
    PreferenceCase.WIN: "the policy got more than the expert",
    PreferenceCase.STEP: "two steps from one state",
    PreferenceCase.OWN: "the policy's best and worst episode",
    PreferenceCase.TREE: "two branches of a tree",
    PreferenceCase.FILE: "a ready pair",
}
"""What each case of a preference pair means, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecord:
    """The preference pairs of an iteration, and how training on them went.

    `num_by_case` counts pairs by case, `num_rejected_by_reason` counts rejections by reason.
    `num_by_margin` counts pairs by reward margin, in bins of width 0.1 keyed by their lower bounds;
    `num_cut` is the number of pairs whose rejected side was cut. `steps` are the optimizer steps,
    in order.
    """

    num_by_case: Counts
    num_rejected_by_reason: Counts = field(default_factory=dict)
    num_by_margin: Mapping[float, int] = field(default_factory=dict)
    num_cut: int = 0
    steps: tuple[PreferenceTrainingStep, ...] = ()


def preferences_section(record: PreferenceRecord) -> Section:
    """Return the section on an iteration's preference pairs and the training on them."""
    note = "Rewards are the environment's; an implicit reward is beta times the log-ratio of policy and reference."
    cases = {": ".join(filter(None, (kind, _CASES.get(kind)))): count for kind, count in record.num_by_case.items()}
    blocks: list[Block] = [iteration.counts_table("What made the difference", "Pairs", cases)]
    if record.num_rejected_by_reason:
        blocks.append(iteration.counts_table("Turned away", "Candidates", record.num_rejected_by_reason))
    if record.num_by_margin:
        caption = f"Margin of reward between the two sides. The rejected side of {record.num_cut} pairs was cut."
        counts = {f"{low:.1f}{wording.DASH}{low + 0.1:.1f}": count for low, count in record.num_by_margin.items()}
        drawing = plots.bars(counts, "Pairs by margin of reward")
        table = iteration.counts_table("Margin", "Pairs", counts)
        blocks.append(Figure(drawing, caption, (Paragraph(caption), table)))
    else:
        blocks.append(Paragraph("Not measured: margins; the pairs tell no rewards."))
    curves = {
        "Log-probability": [(s.step, s.chosen_logps, s.rejected_logps) for s in record.steps],
        "Implicit reward": [(s.step, s.chosen_rewards, s.rejected_rewards) for s in record.steps],
    }
    # One step makes no curve.
    for name, values in curves.items() if len(record.steps) > 1 else ():
        chosen = [(float(step), value) for step, value, _ in values]
        rejected = [(float(step), value) for step, _, value in values]
        caption = f"{name} of the chosen (solid) and the rejected sides (dashed) by optimizer step."
        blocks.append(Figure(plots.curves({"chosen": chosen, "rejected": rejected}, caption), caption))
    if record.steps:
        # The first step, the last one, and three in between.
        positions = sorted({round(part * (len(record.steps) - 1) / 4) for part in range(5)})
        rows = (
            Row(
                (
                    str(step.step),
                    wording.decimal(step.loss, 3),
                    wording.percent(step.reward_accuracy),
                    wording.decimal(step.chosen_logps, 1),
                    wording.decimal(step.rejected_logps, 1),
                    wording.decimal(step.chosen_rewards, 3),
                    wording.decimal(step.rejected_rewards, 3),
                )
            )
            for step in (record.steps[position] for position in positions)
        )
        titles = (
            "Step",
            "Loss",
            "Reward accuracy, %",
            "Log-prob. chosen",
            "Rejected",
            "Implicit reward chosen",
            "Rejected",
        )
        blocks.append(Table(tuple(Column(title) for title in titles), tuple(rows)))
    else:
        blocks.append(Paragraph("Not measured: how training went; no steps were stored."))
    return Section("preferences", TITLE, tuple(blocks), note)


def run_preferences_section(records: Mapping[int, PreferenceRecord]) -> Section:
    """Return the section on the preference pairs of a run, given its records by iteration."""
    rows = []
    for number, record in records.items():
        last_steps = record.steps[-_NUM_LAST_STEPS:]
        loss, accuracy, chosen_reward, rejected_reward = (
            fmean(values) if values else None
            for values in (
                [step.loss for step in last_steps],
                [step.reward_accuracy for step in last_steps if step.reward_accuracy is not None],
                [step.chosen_rewards for step in last_steps if step.chosen_rewards is not None],
                [step.rejected_rewards for step in last_steps if step.rejected_rewards is not None],
            )
        )
        cells = (
            wording.iteration_name(number),
            wording.count(sum(record.num_by_case.values())),
            wording.count(sum(record.num_rejected_by_reason.values())),
            wording.count(record.num_cut),
            wording.count(len(record.steps)),
            wording.decimal(loss, 3),
            wording.percent(accuracy),
            wording.decimal(chosen_reward, 3),
            wording.decimal(rejected_reward, 3),
        )
        rows.append(Row(cells))
    titles = (
        "Pairs",
        "Turned away",
        "Rejected side cut",
        "Optimizer steps",
        "Last loss",
        "Reward accuracy at the end, %",
        "Implicit reward chosen",
        "Rejected",
    )
    table = Table((Column("Iteration", "text"), *map(Column, titles)), tuple(rows))
    note = f"Training numbers are means over the last {_NUM_LAST_STEPS} optimizer steps, since single batches scatter."
    return Section("preferences-run", "Preference pairs over the run", (table,), note)


def funnel(ctx: RunContext, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the funnel from episodes to trained rows: a count for each stage of the iteration."""
    source_id, stage_names = ctx.source_id(iteration), {stage.name for stage in ctx.plan(iteration).stages}
    stages: list[FunnelStage] = []
    if DEMONSTRATE.name in stage_names:
        stages.append(expert_episodes(ctx, iteration))
    counts = datasets.episode_counts(ctx.store, source_id, "rollout")
    if EXPLORE.name in stage_names:
        stages.append(FunnelStage(name="explored episodes", count=counts.played))
    if PREFER.name in stage_names:
        num_pairs = datasets.count_preferences(ctx.store, source_id)
        stages.append(
            FunnelStage(
                name="preference pairs", count=num_pairs, rejected_by_reason=count_rejections(ctx, source_id, STAGE)
            )
        )
    else:
        stages.append(FunnelStage(name="successes", count=counts.solved))
    return with_row_counts(ctx, iteration, stages)


def preference_record(ctx: RunContext, iteration: int) -> PreferenceRecord | None:
    """Return the counts of an iteration's preference pairs and its training steps; None if it does
    not train on pairs.
    """
    if not ctx.plan(iteration).has_pairs:
        return None
    iteration_id, source_id = ctx.iteration_id(iteration), ctx.source_id(iteration)
    counts = preference_counts(ctx.store, source_id)
    return PreferenceRecord(
        num_by_case=counts.kinds,
        num_rejected_by_reason=count_rejections(ctx, source_id, STAGE),
        num_by_margin=counts.margins,
        num_cut=counts.cut,
        steps=tuple(preference_training_steps(ctx.store, iteration_id)),
    )


def pair_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on the pairs of an iteration; () if it does not train on pairs."""
    record = preference_record(ctx, iteration)
    return () if record is None else (preferences_section(record),)


def run_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on pairs and the training on them over iterations 1 to `iteration`; () if
    none of them trains on pairs.
    """
    records_by_iteration = {number: preference_record(ctx, number) for number in range(1, iteration + 1)}
    records = {number: record for number, record in records_by_iteration.items() if record is not None}
    return (run_preferences_section(records),) if records else ()
