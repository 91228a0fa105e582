"""ET-Agent's part of a report: the trajectories of the flywheel by operator, the selected
questions, calls of tools, and behaviour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from agentr_core.evaluation.metrics import Estimate
from agentr_core.methods.catalogue import FUNNEL_OF_GROUPS
from agentr_core.methods.et_agent.evaluate import SOURCE_PREFIX
from agentr_core.methods.et_agent.evolve import STAGE as EVOLVE
from agentr_core.methods.et_agent.selection import RFT
from agentr_core.recipes.environments import TEST
from agentr_core.reports import plots, wording
from agentr_core.reports.document import (
    Block,
    Column,
    EstimateText,
    Figure,
    FunnelStage,
    Paragraph,
    Row,
    Section,
    Table,
)
from agentr_core.runtime.context import RunContext
from agentr_core.stages.evaluate import Measures, evaluation_id, load_measures
from agentr_core.stages.report import count_rejections, with_row_counts
from agentr_core.store.codec.samples import FLYWHEEL, SelectionOutcome, load_selection
from agentr_core.store.queries.datasets import episode_counts
from agentr_core.store.queries.runs import outside_trainings
from agentr_core.store.queries.trees import call_counts, operator_counts

TITLE = "The flywheel by operator"
_OPERATOR_TITLES = {
    "fresh": "fresh, before the first round",
    "C0": "C0 a fresh one beside a right one",
    "C1": "C1 first redundant step written anew",
    "C2": "C2 thoughts written anew",
    "I1": "I1 first flawed step corrected by itself",
    "I2": "I2 a hint after the flawed step",
    "I3": "I3 a hint after the whole",
    "I4": "I4 its own review after the whole",
}


def funnel(ctx: RunContext, iteration: int) -> tuple[FunnelStage, ...]:
    """Return the counts of each stage of an iteration `rft`, from trajectories to trained rows."""
    iteration_id = ctx.iteration_id(iteration)
    counts = episode_counts(ctx.store, iteration_id, FLYWHEEL)
    return with_row_counts(
        ctx,
        iteration,
        [
            FunnelStage(
                name="trajectories",
                count=counts.played,
                rejected_by_reason=count_rejections(ctx, iteration_id, EVOLVE),
            ),
            FunnelStage(
                name="right answers", count=counts.solved, rejected_by_reason=count_rejections(ctx, iteration_id, RFT)
            ),
        ],
    )


def family_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on the trajectories of each operator; none without a flywheel."""
    cost_unit = ctx.recipe.et_agent.curriculum.counts
    counts = operator_counts(ctx.store, ctx.iteration_id(iteration), cost_unit)
    if not counts:
        return ()
    cost_title = cost_unit.capitalize()
    titles = ("Trajectories", "Right, %", cost_title, f"{cost_title} saved, if right", "Samples")
    columns = (Column("Operator", "text"), *map(Column, titles))
    note = (
        f"A child that goes on from its parent has the parent's {cost_unit} up to there, too. {cost_title} saved are "
        "those of the parent minus those of its child, on average."
    )
    rows = (
        Row(
            (
                _OPERATOR_TITLES.get(count.operator, count.operator),
                wording.count(count.children),
                wording.percent(count.right / count.children),
                wording.decimal(count.cost, 2),
                None if count.saved is None else wording.signed(count.saved, 2),
                wording.count(count.samples),
            )
        )
        for count in counts
    )
    return (Section("families", TITLE, (Table(columns, tuple(rows)),), note),)


# The report's section on calls of tools: the provider that answered, and the status of the calls.


def tool_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on the calls of tools in an iteration; none if there were none."""
    counts = call_counts(ctx.store, ctx.run_id, iteration)
    if not counts:
        return ()
    columns = (Column("Tool", "text"), Column("Answered by", "text"), Column("Status", "text"))
    rows = (
        Row(
            (
                count.tool,
                count.provider or "nobody",
                count.status,
                wording.count(count.calls),
                wording.count(count.cached),
                f"{1000 * count.seconds / count.calls:.1f}",
            )
        )
        for count in counts
    )
    table = Table((*columns, *map(Column, ("Calls", "Cached", "Milliseconds a call"))), tuple(rows))
    note = "Code is answered by a level of the sandbox: how far it is confined. agentr doctor explains the levels."
    return (Section("tools", "Calls of tools", (table,), note),)


# The report's section on the questions that a stage of the curriculum chose.

_MAX_FRONT_ROWS = 6
"""Number of fronts that have a row of their own."""


def selection_funnel(ctx: RunContext, iteration: int) -> tuple[FunnelStage, ...]:
    """Return how many questions were answered, passed the filter and were chosen, followed by the
    funnel of the groups sampled for the chosen ones; only that funnel if no selection is stored
    and another program did the training.
    """
    questions = load_selection(ctx.store, ctx.iteration_id(iteration))
    if not questions and outside_trainings(ctx.store, ctx.run_id):
        return FUNNEL_OF_GROUPS.stages(ctx, iteration)
    fit_questions = [question for question in questions if question.front is not None]
    chosen_questions = [question for question in fit_questions if question.selected]
    return (
        FunnelStage(name="questions", count=len(questions)),
        FunnelStage(
            name="fit to be chosen",
            count=len(fit_questions),
            rejected_by_reason=_num_by_reason(questions, is_fit=False),
        ),
        FunnelStage(
            name="chosen questions",
            count=len(chosen_questions),
            rejected_by_reason=_num_by_reason(questions, is_fit=True),
        ),
        *FUNNEL_OF_GROUPS.stages(ctx, iteration),
    )


def selection_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section of an iteration's selection; none where it selects nothing."""
    questions = load_selection(ctx.store, ctx.iteration_id(iteration))
    if not questions:
        return ()
    config = ctx.recipe.et_agent.curriculum
    procedure = "front by front, the last by crowding distance" if config.select == "pareto" else "at random"
    note = (
        f"Each question was answered {config.rollouts} times; S is the standard deviation over its answers, of their "
        f"correctness and of their {config.counts}. Questions are chosen {procedure}; the first front is 0. View "
        "v_selection has all."
    )
    unchosen_points, chosen_points = (
        [_point(question) for question in questions if question.selected is flag] for flag in (False, True)
    )
    caption = "Questions by the dispersion of correctness (across) and of cost (up); the chosen ones are coloured."
    plain_points = [point for point in unchosen_points if point is not None]
    drawing = plots.scatter(plain_points, [point for point in chosen_points if point is not None], caption)
    return (Section("selection", "Selected questions", (Figure(drawing, caption), _fronts_table(questions)), note),)


def _point(question: SelectionOutcome) -> plots.Point | None:
    return None if question.s_corr is None or question.s_tool is None else (question.s_corr, question.s_tool)


def _fronts_table(questions: Sequence[SelectionOutcome]) -> Table:
    """Return a table of the first fronts, the later ones together, and questions in no front."""
    questions_by_front: dict[str, list[SelectionOutcome]] = {}
    for question in sorted(questions, key=lambda question: (question.front is None, question.front or 0)):
        later_title = f"{_MAX_FRONT_ROWS} and later"
        name = (
            "none"
            if question.front is None
            else str(question.front)
            if question.front < _MAX_FRONT_ROWS
            else later_title
        )
        questions_by_front.setdefault(name, []).append(question)
    titles = ("Questions", "Chosen", "Correctness, %", "Cost", "S of correctness", "S of cost")
    rows = []
    for name, front_questions in questions_by_front.items():
        points = [point for question in front_questions if (point := _point(question)) is not None]
        mean_correctness_spread, mean_cost_spread = (
            fmean(point[axis] for point in points) if points else None for axis in (0, 1)
        )
        cells = (
            name,
            wording.count(len(front_questions)),
            wording.count(sum(question.selected for question in front_questions)),
            wording.percent(fmean(question.correctness for question in front_questions)),
            wording.decimal(fmean(question.cost for question in front_questions)),
            wording.decimal(mean_correctness_spread, 3),
            wording.decimal(mean_cost_spread, 3),
        )
        rows.append(Row(cells))
    return Table((Column("Front", "text"), *(Column(title) for title in titles)), tuple(rows))


def _num_by_reason(questions: Sequence[SelectionOutcome], *, is_fit: bool) -> dict[str, int]:
    counts = Counter(
        question.reason for question in questions if (question.front is not None) is is_fit and not question.selected
    )
    return dict(sorted(counts.items()))


# The report's section on behaviour: how many right answers at what cost, by model and by source.

_METRIC_FORMATS: Mapping[str, tuple[str, float, int]] = {
    "performance": ("P, %", 100, 1),
    "performance_gain_over_base": ("P above base, points", 100, 1),
    "efficiency": ("Efficiency, %", 100, 1),
    "efficiency_gain_over_base": ("Efficiency above base", 100, 1),
    "f1": ("F1, knowledge, %", 100, 1),
    "judged": ("Right, mathematics, %", 100, 1),
    "exact_match": ("EM, %", 100, 1),
    "tool_productivity": ("Tool productivity", 1, 1),
    "successful_execution": ("Successful execution, %", 100, 1),
    "reasoning_length": ("P per 1,000 tokens", 1, 2),
    "redundant_calls": ("Redundant calls, %", 100, 1),
    "conciseness": ("Concise, %", 100, 1),
    "nudged_right": ("Corrected by a nudge, %", 100, 1),
}
"""The title, the factor that values are multiplied by, and the digits of each metric."""
_AXES: Mapping[str, str] = {
    "performance": "performance",
    "efficiency": "efficiency",
    "tool_productivity": "tool productivity",
    "successful_execution": "execution",
    "reasoning_length": "brevity",
    "redundant_calls": "no redundancy",
    "conciseness": "conciseness",
}
"""Axes of the radar chart; that of redundant calls shows 1 minus the metric."""


def behaviour_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on behaviour up to an iteration; none if no model was measured."""
    measures_by_iteration = {
        number: load_measures(ctx.store, evaluation_id(ctx, number, TEST)) for number in range(iteration + 1)
    }
    evaluated_by_iteration = {
        number: measures for number, measures in measures_by_iteration.items() if "efficiency" in measures
    }
    if not evaluated_by_iteration:
        return ()
    curriculum = ctx.recipe.et_agent.curriculum
    cost_unit = curriculum.counts
    note = (
        "Means with 95% intervals, clustered by question. P is the mean reward, efficiency the mean of reward / "
        f"{cost_unit} (reward / 1 where there are none), successful execution that of reward / "
        f"(1 + failed {cost_unit}). "
        f"With t {cost_unit} on average, tool productivity is 100 P t / (t + 0.1). All are defined in "
        "agentr_core/methods/et_agent/evaluate.py."
        + (" Calls are also those that were refused, since none was left." if curriculum.refused_calls else "")
    )
    blocks: list[Block] = []
    if iteration in evaluated_by_iteration:
        axes = [name for name in _AXES if all(name in measures for measures in evaluated_by_iteration.values())]
        values = {
            wording.iteration_name(number): [
                1 - measures[name].mean if name == "redundant_calls" else measures[name].mean for name in axes
            ]
            for number, measures in evaluated_by_iteration.items()
        }
        axis_ends = [max(*column, 0.0) or 1.0 for column in zip(*values.values(), strict=True)]
        shares = {
            name: [max(0.0, value) / end for value, end in zip(line, axis_ends, strict=True)]
            for name, line in values.items()
        }
        caption = (
            "Behaviour on the test set: this iteration coloured, the base dashed. Each axis ends at the best of the "
            "models shown; outward is better."
        )
        drawing = plots.radar([_AXES[name] for name in axes], shares, wording.iteration_name(iteration), caption)
        blocks.append(Figure(drawing, caption))
    blocks.append(
        _metrics_table(
            {wording.iteration_name(number): measures for number, measures in evaluated_by_iteration.items()}
        )
    )
    newest_measures = evaluated_by_iteration[max(evaluated_by_iteration)]
    measures_by_source: dict[str, dict[str, Estimate]] = {}
    for name, estimate in newest_measures.items():
        if name.startswith(SOURCE_PREFIX):
            source, _, measure = name.removeprefix(SOURCE_PREFIX).rpartition("/")
            measures_by_source.setdefault(source, {})[measure] = estimate
    if len(measures_by_source) > 1:
        blocks.append(
            Paragraph(f"{wording.iteration_name(max(evaluated_by_iteration)).capitalize()} by source of the questions:")
        )
        blocks.append(_metrics_table(dict(sorted(measures_by_source.items()))))
    return (Section("behaviour", "Behaviour", tuple(blocks), note),)


def _metrics_table(models: Mapping[str, Measures]) -> Table:
    """Return a table with a row for each metric that any model has, and a column for each model or
    source.
    """
    rows = (
        Row(
            (
                _METRIC_FORMATS[name][0],
                *(_cell(measures.get(name), *_METRIC_FORMATS[name][1:]) for measures in models.values()),
            )
        )
        for name in _METRIC_FORMATS
        if any(name in measures for measures in models.values())
    )
    return Table((Column("Metric", "text"), *map(Column, models)), tuple(rows))


def _cell(estimate: Estimate | None, factor: float, digits: int) -> EstimateText | None:
    if estimate is None:
        return None
    text, low, high = (
        wording.decimal(factor * value, digits).replace("-", wording.MINUS)
        for value in (estimate.mean, estimate.low, estimate.high)
    )
    return EstimateText(text, f"{low} to {high}" if math.isfinite(estimate.low) else "")
