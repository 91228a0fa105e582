"""GRPO's part of a report: how many groups were trained on, and how training went step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentr_core.methods.grpo.cuts import AT_START, STAGE
from agentr_core.methods.grpo.train import untrained
from agentr_core.reports import wording
from agentr_core.reports.document import Block, Column, FunnelStage, Paragraph, Row, Section, Table
from agentr_core.runtime.place import Workplace
from agentr_core.stages.curves import group_learning
from agentr_core.store.queries.datasets import rejection_counts
from agentr_core.store.queries.runs import trained_outside
from agentr_core.store.queries.trees import GroupStep, count_revisited, group_counts, group_steps, validations

TITLE = "Reinforcement learning by step"
_ROWS = 12


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return how many groups and episodes were sampled, and how many were trained on."""
    counts, grpo = group_counts(place.store, place.iteration_id(iteration)), place.recipe.grpo
    teaches_alike = grpo.distil is not None or grpo.credit in ("states", "graph")
    alike = {
        "all alike, with wins": counts.alike_with_wins,
        "all alike, without a win": counts.groups - counts.mixed - counts.alike_with_wins,
    }
    rejected = {name: count for name, count in alike.items() if count}
    return (
        FunnelStage(name="groups", count=counts.groups),
        FunnelStage(
            name="groups that teach" if teaches_alike else "groups with contrast", count=counts.mixed, rejected=rejected
        ),
        FunnelStage(name="sampled episodes", count=counts.episodes),
        FunnelStage(name="trained episodes", count=counts.trained_episodes),
    )


def step_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the sections on an iteration's steps; none before the first step."""
    steps = group_steps(place.store, place.iteration_id(iteration))
    if not steps:
        return ()
    size, distils = place.recipe.grpo.num_generations, place.recipe.grpo.distil is not None
    note = (
        f"Training episodes, sampled at temperature 1 by the policy before each step; pass@{size} is the share of "
        "groups with a success, and mixed are groups whose rewards differ. "
    )
    if distils:
        note += "All groups are trained on, by the scorer's word."
    elif place.recipe.grpo.credit in ("states", "graph"):
        note += "Trained on are all in which a step has an advantage."
    else:
        note += "Only these are trained on."
    if any(line.iteration == iteration for line in trained_outside(place.store, place.run_id)):
        note = (
            f"Training episodes as another program sampled them, by step of its training; pass@{size} is the share of "
            "groups with a success, and mixed are groups in which they were worth differently to it."
        )
    if any(step.recovered is not None for step in steps):
        note += (
            " Some groups go on from a failed episode: recovered is the share of their episodes that succeed, and they "
            "do not count in reward and pass@k."
        )
    if place.recipe.grpo.expert_share:
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
    note += cuts_sentence(place, iteration)
    why = untrained(group_counts(place.store, place.iteration_id(iteration)))
    blocks: list[Block] = [Paragraph(f"{why[0].upper()}{why[1:]}.")] if why else []
    step_validations = validations(place.store, place.iteration_id(iteration))
    curves = group_learning(steps, step_validations, size)
    idle = sum(step.entropy is None and not step.mixed_share for step in steps)
    if idle and len(steps) > 1:
        blocks.append(Paragraph(f"{idle} of {len(steps)} steps had no mixed group, and trained nothing."))
    training = Section("groups", TITLE, (*blocks, *curves, _table(steps, size)), note)
    if not step_validations:
        return (training,)
    columns = (Column("Step"), Column("Success, %"), Column("Reward"), Column("Episodes"))
    rows = tuple(
        Row((str(v.step), wording.percent(v.success), wording.decimal(v.reward, 3), wording.count(v.episodes)))
        for v in step_validations
    )
    note = f"Set {place.recipe.evaluation.development}, played greedily with the weights after a step."
    return (training, Section("validation", "Validation by step", (Table(columns, rows),), note))


def cuts_sentence(place: Workplace, iteration: int) -> str:
    """Return as a sentence how many failed episodes were cut by `grpo.revision_cut`, and how many
    at random; empty if the recipe cuts all of them at random.
    """
    by, iteration_id = place.recipe.grpo.revision_cut, place.iteration_id(iteration)
    if by == "random":
        return ""
    counts = rejection_counts(place.store, iteration_id).get(STAGE, {})
    at_random = {
        reason: counts[reason] for reason in ("no-error-found", "no-drop-found", "not-judged") if reason in counts
    }
    cut = max(0, count_revisited(place.store, iteration_id) - sum(at_random.values()))
    where = "first step that the judge calls bad" if by == "verdict" else "largest drop of their group's value"
    random_clause = "".join(f", {wording.count(count)} at random ({reason})" for reason, count in at_random.items())
    start = counts.get(AT_START, 0)
    start_clause = (
        f"; for {wording.count(start)} that is the first step, and a group began at the start" if start else ""
    )
    return f" Of the failed episodes {wording.count(cut)} were cut before the {where}{random_clause}{start_clause}."


def run_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on reinforcement learning over all iterations up to one; none for fewer
    than two steps.
    """
    parts = {number: group_steps(place.store, place.iteration_id(number)) for number in range(1, iteration + 1)}
    steps = [step for part in parts.values() for step in part]
    if len(steps) < 2:
        return ()
    lengths = [f"{wording.iteration(number)}: {len(part)} steps" for number, part in parts.items() if part]
    note = f"All steps one after the other; {', '.join(lengths)}. The page of an iteration has its table."
    run_validations = [
        (number, row) for number in parts for row in validations(place.store, place.iteration_id(number))
    ]
    before = {number: sum(len(parts[other]) for other in parts if other < number) for number in parts}
    curves = group_learning(
        [row._replace(step=at) for at, row in enumerate(steps, 1)],
        [row._replace(step=before[number] + row.step) for number, row in run_validations],
        place.recipe.grpo.num_generations,
    )
    return (Section("groups-run", "Reinforcement learning over the run", tuple(curves), note),)


def _table(steps: Sequence[GroupStep], size: int) -> Table:
    """Return a table of the first and last steps and some in between, without columns that have no
    value.
    """

    def numbers(values: Iterable[float | None], digits: int) -> list[str | None]:
        return [None if value is None else wording.decimal(value, digits) for value in values]

    def shares(values: Iterable[float | None]) -> list[str | None]:
        return [None if value is None else wording.percent(value) for value in values]

    places = sorted({round(part * (len(steps) - 1) / (_ROWS - 1)) for part in range(_ROWS)})
    rows = [steps[place] for place in places]
    columns: dict[str, list[str | None]] = {
        "Step": [str(step.step) for step in rows],
        "Reward": numbers((step.reward for step in rows), 3),
        "pass@1, %": shares(step.pass_at_1 for step in rows),
        f"pass@{size}, %": shares(step.pass_at_n for step in rows),
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
