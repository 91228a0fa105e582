"""A comparison of arms as tables: the results of each on the same budget, and its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentr_core.reports import wording
from agentr_core.reports.document import (
    Cell,
    Column,
    Estimate,
    EstimateText,
    IterationScore,
    Listing,
    Paragraph,
    Row,
    Section,
    Table,
    Whisker,
)
from agentr_core.reports.iteration import gain_cell

BASE_NAME = "base"
"""The name, in tables, of the model that all arms begin with."""
SCORE_NOTE = (
    "Means over seeds with 95% intervals (Student's t), on the same held-out instances; without an interval there was "
    "one seed. {seeds} The difference is paired by seed. Steps are those of successful episodes; recovered is the "
    "revision test, on failed prefixes of the base model."
)
SEEDS_NOTE = (
    "The seeds vary what training does with one pool of samples: another pool, or other instances, may differ by more "
    "than the intervals show."
)
WHOLE_SEEDS_NOTE = (
    "Each seed is a whole run, with failed prefixes of its own; the base's row is that of the first seed. Other "
    "instances may differ by more than the intervals show."
)
TOKENS_NOTE = (
    "Every arm is trained until the budget is reached; the last sample goes over it. Tokens of preference pairs are "
    "those of both sides."
)
TIME_NOTE = (
    "Every arm is trained until the time is up, passing over its rows again and again; the last step goes over it. The "
    "learning rate follows the time. Loading, and what the reference model makes of preference pairs, are not counted. "
    "Tokens of pairs are those of both sides."
)
WHOLE_RUNS_NOTE = (
    "Every arm is a run of its own, which collects for itself. Sampled tokens are those that models wrote in searches, "
    "judgements, rollouts and edits, without evaluations; the time is that of training."
)
MEANS_NOTE = (
    "Runs whose recipes differ in the seed only are taken together and named by the settings in which they differ "
    "from the others. Means over seeds with 95% intervals (Student's t); without an interval there was one seed. "
    "Differences from the first are in points, paired by seed."
)
DIFFERENCES_NOTE = (
    "Success of the first model minus that of the second, in points, over the episodes that both played, with the same "
    "seed of training; 95% intervals, clustered by what instances are variants of, over all seeds together. How far "
    "seeds differ among themselves is in the first table."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedMean:
    """A mean over `n` seeds; `low` and `high` bound its 95% interval (Student's t), or are None for
    a single seed.
    """

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMean:
    """The mean scores of a group of runs that differ only in the seed: of the models of one
    iteration (0: the base model) on one evaluation set.
    """

    group: str
    name: str
    """The name of the set."""
    iteration: int
    success: SeedMean | None
    reward: SeedMean | None
    versus_first: SeedMean | None
    """Success minus that of the first group with the same seeds; None for that group itself."""
    runs: Mapping[int, str]
    """The ids of the runs, by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One training of an arm and where to find it. `seconds` is the time spent in training.

    `sampled_tokens` is set for a whole run, `num_rows` and the number of passes over them for a run
    on a pool.
    """

    seed: int
    run_id: str
    checkpoint_id: str
    dataset_hash: str
    trained_tokens: int
    seconds: float
    score: IterationScore
    num_rows: int = 0
    num_passes: float = 0.0
    sampled_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """The results of an arm. `runs` are its evaluated runs; a mean is None if nothing was measured.

    `versus_first` is its success minus that of the first arm.
    """

    name: str
    trains_on: str
    runs: tuple[ArmRun, ...]
    success: SeedMean | None = None
    reward: SeedMean | None = None
    steps: SeedMean | None = None
    revision: SeedMean | None = None
    versus_first: SeedMean | None = None
    metrics: Mapping[str, SeedMean | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The success of an arm minus that of another arm or of the base, by set of held-out instances;
    a set without an estimate is missing.
    """

    arm: str
    reference: str
    estimate_by_set: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """The results of all arms of a comparison.

    Arms that share a pool have one budget, `max_tokens` or `max_seconds`, and the other is 0; for
    whole runs both are 0. `base` is the score of the model that all arms start with.
    """

    recipe_name: str
    run_id: str
    date: str
    environment: str
    model: str
    max_tokens: int
    max_seconds: float
    seeds: tuple[int, ...]
    base: IterationScore | None
    arms: tuple[ArmReport, ...]
    metrics: tuple[str, ...] = ()
    """Names of the measures that have columns of their own."""
    base_metrics: Mapping[str, float] = field(default_factory=dict)
    """The values of `metrics` for the base model."""
    differences: tuple[Difference, ...] = ()
    recipe_yaml: str = ""

    @property
    def has_whole_runs(self) -> bool:
        """Whether the arms are whole runs."""
        return not (self.max_tokens or self.max_seconds)


def sections(report: ComparisonReport) -> tuple[Section, ...]:
    """Return the sections of the page: scores, differences if there are any, the budget, the runs,
    the recipe.
    """
    seeds_note = WHOLE_SEEDS_NOTE if report.has_whole_runs else SEEDS_NOTE
    difference_section = Section(
        "differences", "Differences", (differences_table(report.differences),), DIFFERENCES_NOTE
    )
    if report.has_whole_runs:
        budget_title, budget_note = "What each arm sampled and trained", WHOLE_RUNS_NOTE
    elif report.max_seconds:
        budget_title, budget_note = f"Budget: {wording.duration(report.max_seconds)} of training", TIME_NOTE
    else:
        budget_title, budget_note = f"Budget: {wording.count(report.max_tokens)} trained tokens", TOKENS_NOTE
    runs_without_result = [
        f"{arm.name} with seed {seed}"
        for arm in report.arms
        for seed in report.seeds
        if seed not in {run.seed for run in arm.runs}
    ]
    missing_note = (
        f"Without a result, because they failed or have not ended: {', '.join(runs_without_result)}. "
        "The same agentr compare command tries them again."
    )
    return (
        Section("scores", "Scores by arm", (scores_table(report),), SCORE_NOTE.format(seeds=seeds_note)),
        *([difference_section] if report.differences else []),
        Section("budget", budget_title, (budget_table(report),), budget_note),
        Section(
            "runs",
            "Runs",
            (runs_table(report), *([Paragraph(missing_note)] if runs_without_result else [])),
            "The command agentr report writes the page of any of them.",
        ),
        Section("recipe", "Recipe", (Listing("The resolved recipe", "yaml", report.recipe_yaml),)),
    )


def scores_table(report: ComparisonReport) -> Table:
    """Return one row for each arm: success, reward, steps to success and the revision test, with
    their intervals.
    """
    first_arm = report.arms[0].name if report.arms else ""
    columns = (
        Column("Arm", "text"),
        Column("Success %"),
        Column("", "whisker"),
        Column(f"Against {first_arm}"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Steps to success"),
        Column("Recovered %"),
        *(Column(wording.measure_name(metric)) for metric in report.metrics),
        Column("Seeds"),
    )
    base_metrics = report.base_metrics
    base_cells = [
        wording.measure_value(name, base_metrics[name]) if name in base_metrics else "" for name in report.metrics
    ]
    rows = []
    if report.base is not None:
        base_score = report.base
        base_success = base_score.success.value
        base_row = (
            BASE_NAME,
            wording.percent(base_success),
            Whisker(base_success, base_success, base_success),
            "",
            wording.percent(base_score.reward.value),
            wording.decimal(base_score.steps_to_success, 1),
            wording.percent(base_score.revision.value if base_score.revision else None),
        )
        rows.append(Row((*base_row, *base_cells, "")))
    for arm in report.arms:
        num_runs, num_seeds = len(arm.runs), len(report.seeds)
        rows.append(
            Row(
                (
                    arm.name,
                    _cell(arm.success, wording.percent),
                    _whisker(arm.success),
                    "" if arm.name == first_arm else _cell(arm.versus_first, wording.points),
                    _cell(arm.reward, wording.percent),
                    _cell(arm.steps, partial(wording.decimal, digits=1)),
                    _cell(arm.revision, wording.percent),
                    *(_cell(arm.metrics.get(name), partial(wording.measure_value, name)) for name in report.metrics),
                    str(num_runs) if num_runs == num_seeds else f"{num_runs} of {num_seeds}",
                )
            )
        )
    return Table(columns, tuple(rows))


def group_means_table(means: Sequence[GroupMean]) -> Table:
    """Return one row for each set, model and group of runs: success, its difference from that of
    the first group, and reward, with their intervals.
    """
    first_group = means[0].group if means else ""
    has_several_groups = any(mean.group != first_group for mean in means)
    columns = (
        *(Column("Set", "text"), Column("Model", "text"), Column("Runs", "text"), Column("Success %")),
        Column("", "whisker"),
        *([Column("Against the first")] if has_several_groups else []),
        *(Column(f"Reward {wording.TIMES}100"), Column("Seeds", "text")),
    )
    rows = (
        Row(
            (
                *(wording.label(mean.name), wording.iteration_name(mean.iteration), mean.group),
                *(_cell(mean.success, wording.percent), _whisker(mean.success)),
                *(
                    ["" if mean.group == first_group else _cell(mean.versus_first, wording.points)]
                    if has_several_groups
                    else []
                ),
                *(_cell(mean.reward, wording.percent), ", ".join(map(str, mean.runs))),
            )
        )
        for mean in means
    )
    return Table(columns, tuple(rows))


def differences_table(differences: Sequence[Difference]) -> Table:
    """Return one row for each pair of models, with the difference on each set as a column."""
    names = dict.fromkeys(name for difference in differences for name in difference.estimate_by_set)
    columns = (Column("Arm", "text"), Column("Against", "text"), *(Column(wording.label(name)) for name in names))
    rows = (
        Row(
            (difference.arm, difference.reference, *(gain_cell(difference.estimate_by_set.get(name)) for name in names))
        )
        for difference in differences
    )
    return Table(columns, tuple(rows))


def budget_table(report: ComparisonReport) -> Table:
    """Return what each arm was trained on and what was spent on it, as means over its runs."""
    if report.has_whole_runs:
        columns: tuple[Column, ...] = (
            Column("Arm", "text"),
            Column("Method", "text"),
            Column("Sampled tokens"),
            Column("Trained tokens"),
            Column("Time"),
        )
        rows = [
            Row(
                (
                    arm.name,
                    arm.trains_on,
                    wording.count(round(_mean([run.sampled_tokens for run in arm.runs]))),
                    wording.count(round(_mean([run.trained_tokens for run in arm.runs]))),
                    wording.duration(_mean([run.seconds for run in arm.runs])),
                )
            )
            for arm in report.arms
            if arm.runs
        ]
        return Table(columns, tuple(rows))
    columns = (
        Column("Arm", "text"),
        Column("Trained on", "text"),
        Column("Rows"),
        Column("Trained tokens"),
        Column("Passes"),
        Column("Time"),
    )
    rows = [
        Row(
            (
                arm.name,
                arm.trains_on,
                wording.count(round(_mean([run.num_rows for run in arm.runs]))),
                wording.count(round(_mean([run.trained_tokens for run in arm.runs]))),
                wording.decimal(_mean([run.num_passes for run in arm.runs]), 1),
                wording.duration(_mean([run.seconds for run in arm.runs])),
            )
        )
        for arm in report.arms
        if arm.runs
    ]
    return Table(columns, tuple(rows))


def runs_table(report: ComparisonReport) -> Table:
    """Return one row for each run of each arm: its scores and its ids in the store."""
    columns = (
        Column("Arm", "text"),
        Column("Seed"),
        Column("Success %"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Steps to success"),
        Column("Recovered %"),
        Column("Run", "code"),
        Column("Checkpoint", "code"),
        Column("Dataset", "code"),
    )
    rows = (
        Row(
            (
                arm.name,
                str(run.seed),
                wording.percent(run.score.success.value),
                wording.percent(run.score.reward.value),
                wording.decimal(run.score.steps_to_success, 1),
                wording.percent(run.score.revision.value if run.score.revision else None),
                run.run_id,
                run.checkpoint_id,
                run.dataset_hash,
            )
        )
        for arm in report.arms
        for run in arm.runs
    )
    return Table(columns, tuple(rows))


def _cell(mean: SeedMean | None, to_text: Callable[[float], str]) -> Cell:
    if mean is None:
        return wording.NOTHING
    if mean.low is None or mean.high is None:
        return to_text(mean.value)
    return EstimateText(to_text(mean.value), f"{to_text(mean.low)} to {to_text(mean.high)}")


def _whisker(mean: SeedMean | None) -> Whisker | None:
    if mean is None:
        return None
    low, high = (mean.value if bound is None else bound for bound in (mean.low, mean.high))
    return Whisker(low, mean.value, high)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
