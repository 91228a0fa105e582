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
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report import expert_episodes, rejected_by, to_rows
from agentr_core.store.queries import datasets
from agentr_core.store.queries.datasets import PreferenceTrainingStep, preference_counts, preference_training
from agentr_core.types import PreferenceCase

# The part of a report about preference pairs: how many there are, how far apart their sides are,
# and how training on them went.

TITLE = "Preference pairs"
_END = 5
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

    `kinds` counts pairs by case, `rejected` counts rejections by reason. `margins` counts pairs by
    reward margin, in bins of width 0.1 keyed by their lower bounds; `cut` is the number of pairs
    whose rejected side was cut. `steps` are the optimizer steps, in order.
    """

    kinds: Counts
    rejected: Counts = field(default_factory=dict)
    margins: Mapping[float, int] = field(default_factory=dict)
    cut: int = 0
    steps: tuple[PreferenceTrainingStep, ...] = ()


def preferences(record: PreferenceRecord) -> Section:
    """Return the section on an iteration's preference pairs and the training on them."""
    note = "Rewards are the environment's; an implicit reward is beta times the log-ratio of policy and reference."
    cases = {": ".join(filter(None, (kind, _CASES.get(kind)))): count for kind, count in record.kinds.items()}
    blocks: list[Block] = [iteration.counts("What made the difference", "Pairs", cases)]
    if record.rejected:
        blocks.append(iteration.counts("Turned away", "Candidates", record.rejected))
    if record.margins:
        caption = f"Margin of reward between the two sides. The rejected side of {record.cut} pairs was cut."
        counts = {f"{low:.1f}{wording.TO}{low + 0.1:.1f}": count for low, count in record.margins.items()}
        drawing = plots.bars(counts, "Pairs by margin of reward")
        instead = iteration.counts("Margin", "Pairs", counts)
        blocks.append(Figure(drawing, caption, (Paragraph(caption), instead)))
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
        places = sorted({round(part * (len(record.steps) - 1) / 4) for part in range(5)})
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
            for step in (record.steps[place] for place in places)
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


def preferences_of_run(records: Mapping[int, PreferenceRecord]) -> Section:
    """Return the section on the preference pairs of a run, given its records by iteration."""
    rows = []
    for number, record in records.items():
        end = record.steps[-_END:]
        loss, accuracy, chosen, rejected = (
            fmean(values) if values else None
            for values in (
                [step.loss for step in end],
                [step.reward_accuracy for step in end if step.reward_accuracy is not None],
                [step.chosen_rewards for step in end if step.chosen_rewards is not None],
                [step.rejected_rewards for step in end if step.rejected_rewards is not None],
            )
        )
        cells = (
            wording.iteration(number),
            wording.count(sum(record.kinds.values())),
            wording.count(sum(record.rejected.values())),
            wording.count(record.cut),
            wording.count(len(record.steps)),
            wording.decimal(loss, 3),
            wording.percent(accuracy),
            wording.decimal(chosen, 3),
            wording.decimal(rejected, 3),
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
    note = f"Training numbers are means over the last {_END} optimizer steps, since single batches scatter."
    return Section("preferences-run", "Preference pairs over the run", (table,), note)


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the funnel from episodes to trained rows: a count for each stage of the iteration."""
    source, names = place.source_id(iteration), {stage.name for stage in place.plan(iteration).stages}
    stages: list[FunnelStage] = []
    if DEMONSTRATE.name in names:
        stages.append(expert_episodes(place, iteration))
    counts = datasets.episode_counts(place.store, source, "rollout")
    if EXPLORE.name in names:
        stages.append(FunnelStage(name="explored episodes", count=counts.played))
    if PREFER.name in names:
        pair_count = datasets.count_preferences(place.store, source)
        stages.append(
            FunnelStage(name="preference pairs", count=pair_count, rejected=rejected_by(place, source, STAGE))
        )
    else:
        stages.append(FunnelStage(name="successes", count=counts.solved))
    return to_rows(place, iteration, stages)


def preference_record(place: Workplace, iteration: int) -> PreferenceRecord | None:
    """Return the counts of an iteration's preference pairs and its training steps; None if it does
    not train on pairs.
    """
    if not place.plan(iteration).pairs:
        return None
    iteration_id, source_id = place.iteration_id(iteration), place.source_id(iteration)
    counts = preference_counts(place.store, source_id)
    return PreferenceRecord(
        kinds=counts.kinds,
        rejected=rejected_by(place, source_id, STAGE),
        margins=counts.margins,
        cut=counts.cut,
        steps=tuple(preference_training(place.store, iteration_id)),
    )


def pair_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on the pairs of an iteration; () if it does not train on pairs."""
    record = preference_record(place, iteration)
    return () if record is None else (preferences(record),)


def run_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on pairs and the training on them over iterations 1 to `iteration`; () if
    none of them trains on pairs.
    """
    by_iteration = {number: preference_record(place, number) for number in range(1, iteration + 1)}
    records = {number: record for number, record in by_iteration.items() if record is not None}
    return (preferences_of_run(records),) if records else ()
