"""GRPO's part of a report: how many groups were trained on, and how training went step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentr_core.methods.grpo.cuts import AT_START, STAGE
from agentr_core.methods.grpo.train import untrained_reason
from agentr_core.reports import wording
from agentr_core.reports.document import Block, Column, FunnelStage, Paragraph, Row, Section, Table
from agentr_core.runtime.context import RunContext
from agentr_core.stages.curves import group_rl_figures
from agentr_core.store.queries.datasets import rejection_counts
from agentr_core.store.queries.runs import outside_trainings
from agentr_core.store.queries.trees import GroupStep, count_revisited_episodes, group_counts, group_steps, validations

TITLE = "Reinforcement learning by step"
_MAX_ROWS = 12


def funnel(ctx: RunContext, iteration: int) -> tuple[FunnelStage, ...]:
    """Return how many groups and episodes were sampled, and how many were trained on."""
    counts, grpo = group_counts(ctx.store, ctx.iteration_id(iteration)), ctx.recipe.grpo
    trains_on_alike = grpo.distil is not None or grpo.credit in ("states", "graph")
    num_alike_by_kind = {
        "all alike, with wins": counts.alike_with_wins,
        "all alike, without a win": counts.groups - counts.mixed - counts.alike_with_wins,
    }
    rejected = {name: count for name, count in num_alike_by_kind.items() if count}
    return (
        FunnelStage(name="groups", count=counts.groups),
        FunnelStage(
            name="groups that teach" if trains_on_alike else "groups with contrast",
            count=counts.mixed,
            rejected_by_reason=rejected,
        ),
        FunnelStage(name="sampled episodes", count=counts.episodes),
        FunnelStage(name="trained episodes", count=counts.trained_episodes),
    )


def step_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the sections on an iteration's steps; none before the first step."""
    steps = group_steps(ctx.store, ctx.iteration_id(iteration))
    if not steps:
        return ()
    group_size, is_distilling = ctx.recipe.grpo.num_generations, ctx.recipe.grpo.distil is not None
    note = (
        f"Training episodes, sampled at temperature 1 by the policy before each step; pass@{group_size} is the share "
        "of groups with a success, and mixed are groups whose rewards differ. "
    )
    if is_distilling:
        note += "All groups are trained on, by the scorer's word."
    elif ctx.recipe.grpo.credit in ("states", "graph"):
        note += "Trained on are all in which a step has an advantage."
    else:
        note += "Only these are trained on."
    if any(line.iteration == iteration for line in outside_trainings(ctx.store, ctx.run_id)):
        note = (
            f"Training episodes as another program sampled them, by step of its training; pass@{group_size} is the "
            "share of groups with a success, and mixed are groups in which they were worth differently to it."
        )
    if any(step.recovered is not None for step in steps):
        note += (
            " Some groups go on from a failed episode: recovered is the share of their episodes that succeed, and they "
            "do not count in reward and pass@k."
        )
    if ctx.recipe.grpo.expert_share:
        note += (
            " Where nothing was ever won, some groups go on from the expert's first steps; they do not count in reward "
            "and pass@k either."
        )
    if any(step.compared_share is not None for step in steps):
        note += (
            " A step helps if it is the first of a shortest way to a reward that its group found; praised steps have a "
            "positive advantage, punished ones a negative one."
        )
    conflicts = [step.state_conflicts for step in steps if step.state_conflicts]
    if conflicts:
        note += (
            f" Of the actions that were taken again in a state, up to {wording.percent(max(conflicts))}% in a step led "
            "to another one than before: the world's keys of states are that coarse."
        )
    note += cuts_sentence(ctx, iteration)
    reason = untrained_reason(group_counts(ctx.store, ctx.iteration_id(iteration)))
    blocks: list[Block] = [Paragraph(f"{reason[0].upper()}{reason[1:]}.")] if reason else []
    step_validations = validations(ctx.store, ctx.iteration_id(iteration))
    curves = group_rl_figures(steps, step_validations, group_size)
    num_idle = sum(step.entropy is None and not step.mixed_share for step in steps)
    if num_idle and len(steps) > 1:
        blocks.append(Paragraph(f"{num_idle} of {len(steps)} steps had no mixed group, and trained nothing."))
    training = Section("groups", TITLE, (*blocks, *curves, _steps_table(steps, group_size)), note)
    if not step_validations:
        return (training,)
    columns = (Column("Step"), Column("Success, %"), Column("Reward"), Column("Episodes"))
    rows = tuple(
        Row((str(v.step), wording.percent(v.success), wording.decimal(v.reward, 3), wording.count(v.episodes)))
        for v in step_validations
    )
    note = f"Set {ctx.recipe.evaluation.development}, played greedily with the weights after a step."
    return (training, Section("validation", "Validation by step", (Table(columns, rows),), note))


def cuts_sentence(ctx: RunContext, iteration: int) -> str:
    """Return as a sentence how many failed episodes were cut by `grpo.revision_cut`, and how many
    at random; empty if the recipe cuts all of them at random.
    """
    rule, iteration_id = ctx.recipe.grpo.revision_cut, ctx.iteration_id(iteration)
    if rule == "random":
        return ""
    counts = rejection_counts(ctx.store, iteration_id).get(STAGE, {})
    num_random_by_reason = {
        reason: counts[reason] for reason in ("no-error-found", "no-drop-found", "not-judged") if reason in counts
    }
    num_cut = max(0, count_revisited_episodes(ctx.store, iteration_id) - sum(num_random_by_reason.values()))
    location = "first step that the judge calls bad" if rule == "verdict" else "largest drop of their group's value"
    random_clause = "".join(
        f", {wording.count(count)} at random ({reason})" for reason, count in num_random_by_reason.items()
    )
    num_at_start = counts.get(AT_START, 0)
    start_clause = (
        f"; for {wording.count(num_at_start)} that is the first step, and a group began at the start"
        if num_at_start
        else ""
    )
    return (
        f" Of the failed episodes {wording.count(num_cut)} were cut before the {location}{random_clause}{start_clause}."
    )


def run_sections(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the section on reinforcement learning over all iterations up to one; none for fewer
    than two steps.
    """
    steps_by_iteration = {
        number: group_steps(ctx.store, ctx.iteration_id(number)) for number in range(1, iteration + 1)
    }
    steps = [step for iteration_steps in steps_by_iteration.values() for step in iteration_steps]
    if len(steps) < 2:
        return ()
    lengths = [
        f"{wording.iteration_name(number)}: {len(iteration_steps)} steps"
        for number, iteration_steps in steps_by_iteration.items()
        if iteration_steps
    ]
    note = f"All steps one after the other; {', '.join(lengths)}. The page of an iteration has its table."
    run_validations = [
        (number, row) for number in steps_by_iteration for row in validations(ctx.store, ctx.iteration_id(number))
    ]
    num_steps_before = {
        number: sum(len(steps_by_iteration[other]) for other in steps_by_iteration if other < number)
        for number in steps_by_iteration
    }
    curves = group_rl_figures(
        [row._replace(step=position) for position, row in enumerate(steps, 1)],
        [row._replace(step=num_steps_before[number] + row.step) for number, row in run_validations],
        ctx.recipe.grpo.num_generations,
    )
    return (Section("groups-run", "Reinforcement learning over the run", tuple(curves), note),)


def _steps_table(steps: Sequence[GroupStep], group_size: int) -> Table:
    """Return a table of the first and last steps and some in between, without columns that have no
    value.
    """

    def numbers(values: Iterable[float | None], digits: int) -> list[str | None]:
        return [None if value is None else wording.decimal(value, digits) for value in values]

    def shares(values: Iterable[float | None]) -> list[str | None]:
        return [None if value is None else wording.percent(value) for value in values]

    positions = sorted({round(part * (len(steps) - 1) / (_MAX_ROWS - 1)) for part in range(_MAX_ROWS)})
    rows = [steps[position] for position in positions]
    columns: dict[str, list[str | None]] = {
        "Step": [str(step.step) for step in rows],
        "Reward": numbers((step.reward for step in rows), 3),
        "pass@1, %": shares(step.pass_at_1 for step in rows),
        f"pass@{group_size}, %": shares(step.pass_at_n for step in rows),
        "Recovered, %": shares(step.recovered for step in rows),
        "Mixed, %": shares(step.mixed_share for step in rows),
        "Tokens an episode": numbers((step.episode_tokens for step in rows), 1),
        "Cut replies, %": shares(step.cut_share for step in rows),
        "Tokens/s": numbers((step.tokens_per_second for step in rows), 0),
        "Entropy": numbers((step.entropy for step in rows), 3),
        "KL to sampler": numbers((step.sampler_kl for step in rows), 5),
        "KL to scorer": numbers((step.scorer_kl for step in rows), 4),
        "KL to start": numbers((step.kl for step in rows), 4),
        "Clipped, %": shares(step.clip_share for step in rows),
        "Worth": numbers((step.shaped for step in rows), 3),
    }
    filled_columns = {title: cells for title, cells in columns.items() if set(cells) != {None}}
    return Table(tuple(map(Column, filled_columns)), tuple(map(Row, zip(*filled_columns.values(), strict=True))))
