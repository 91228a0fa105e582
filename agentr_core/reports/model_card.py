"""The card of a published checkpoint: what it is, how it was made, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from agentr_core.reports import wording
from agentr_core.reports.document import (
    BASE_ITERATION,
    Column,
    Estimate,
    IterationReport,
    IterationScore,
    Row,
    Table,
    UnfinishedEvaluation,
    reports_of_one_run,
)
from agentr_core.reports.iteration import (
    gain_cell,
    promotion_sentence,
    single_episode_sets,
    unfinished_rows,
    worlds_table,
)
from agentr_core.reports.markdown import table_markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class CardScore:
    """Success of a checkpoint on one evaluation set, and its gain over the base on the same
    episodes.
    """

    name: str
    split: str
    success: Estimate
    gain: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The contents of a card.

    `parent` and `licence` are as the user gives them, empty if not given. `recipe` is the resolved
    recipe of the run, and `ancestry` the lines of `agentr trace`.
    """

    name: str
    method: str
    iteration: int
    worlds: tuple[str, ...]
    parent: str
    licence: str
    weights_sha256: str
    trained_tokens: int
    num_steps: int
    dataset_hash: str
    scores: tuple[CardScore, ...]
    recipe: Mapping[str, Any]
    comparison_run_id: str
    """The run of the comparison whose arm it is; empty if it is none."""
    versions: Mapping[str, str]
    ancestry: tuple[str, ...]


def _front_matter(card: Card) -> str:
    data = ModelCardData(
        base_model=card.parent or None,
        license=card.licence or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["agentr", card.method, *card.worlds],
    )
    return str(data.to_yaml())


def render_card(card: Card) -> str:
    """Return the card as the README.md of a model directory: YAML that the hub reads, then text."""
    parent_text = f"`{card.parent}`" if card.parent else "a model that its maker did not name"
    rows = [
        f"| {score.name} ({score.split}) | {wording.estimate_text(score.success)} | {gain_cell(score.gain)} "
        f"| {score.success.n} |"
        for score in card.scores
    ]
    scores_text = "It was not evaluated."
    if rows:
        scores_text = "\n".join(["| set | success % | gain over base | episodes |", "|---|---|---|---|", *rows])
    facts = {
        "trained tokens": f"{card.trained_tokens:,}",
        "optimizer steps": f"{card.num_steps:,}",
        "dataset hash": card.dataset_hash or "none: it was trained on episodes of its own",
        "SHA-256 of the weights": card.weights_sha256,
        **card.versions,
    }
    table_of_facts = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    return f"""---
{_front_matter(card)}
---

# {card.name}

A language agent for {", ".join(card.worlds)}, made from {parent_text} by iteration {card.iteration} of
method {card.method}.

## Scores on held-out instances

{scores_text}

Success is the environment's own flag, with its 95% interval (Wilson's, or clustered where several
episodes are of one instance); the gain is over the model that the run began with, paired by
instance.

## Training

| | |
|---|---|
{table_of_facts}

<details><summary>The resolved recipe</summary>
{_ARM_NOTE.format(card.comparison_run_id) if card.comparison_run_id else ""}
```yaml
{yaml.safe_dump(dict(card.recipe), sort_keys=False, allow_unicode=True).rstrip()}
```

</details>

## Lineage

```text
{chr(10).join(card.ancestry)}
```
"""


_ARM_NOTE = """
It is that of an arm of comparison {}: `agentr compare` makes it of the recipe of the comparison,
and it does not load by itself.
"""


# Success per iteration of one run, as a short table for a terminal or a Prefect artifact.


def summary_table(reports: Sequence[IterationReport]) -> str:
    """Return success per iteration with 95% intervals as aligned plain text, one line each, base
    first; below the table, the model that was promoted, if the run promotes the best one.

    Raises:
        ValueError: there is no report, or the reports are not all of one run.
    """
    promotion = reports_of_one_run(reports)[-1].promoted
    return table_text(_summary_table(reports)) + (f"{promotion_sentence(promotion)}\n" if promotion else "")


def summary_markdown(reports: Sequence[IterationReport]) -> str:
    """Return the same table in Markdown. Raises `ValueError` as `summary_table` does."""
    return table_markdown(_summary_table(reports))


def table_text(table: Table) -> str:
    """Return a table as aligned plain text, one line a row; drawn columns are left out."""
    positions = [position for position, column in enumerate(table.columns) if not column.is_drawn]
    columns = [table.columns[position] for position in positions]
    lines = [
        [column.title for column in columns],
        *([str(row.cells[position]) for position in positions] for row in table.rows),
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.ljust(width) if column.kind == "text" else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def _summary_table(reports: Sequence[IterationReport]) -> Table:
    run_reports = reports_of_one_run(reports)
    # The score in the latest report counts, since an evaluation may have been repeated.
    scores = {score.iteration: score for report in run_reports for score in report.scores}
    base_score, pending = scores.get(BASE_ITERATION), run_reports[-1].unfinished_evaluations
    if any(score.worlds for score in scores.values()):
        return worlds_table([scores[key] for key in sorted(scores)], max(scores))
    if any(score.sets for score in scores.values()):
        return _sets_table([scores[key] for key in sorted(scores)], pending)
    columns = (
        Column("Model", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("Against base (95% interval)"),
        Column(f"Reward {wording.TIMES}100"),
        Column("Episodes"),
    )
    rows = []
    for _, score in sorted(scores.items()):
        against = gain_cell(score.versus_base)
        if score.versus_base is None and base_score is not None and score is not base_score:
            against = wording.points(score.success.value - base_score.success.value)
        rows.append(
            Row(
                (
                    wording.model_name(score),
                    wording.percent(score.success.value),
                    wording.interval(score.success),
                    against,
                    wording.percent(score.reward.value),
                    wording.count(score.success.n),
                )
            )
        )
    rows += [
        Row(
            (
                f"{wording.model_name(score)}, revision test",
                wording.percent(score.revision.value),
                wording.interval(score.revision),
                wording.NOTHING,
                wording.percent(score.revision_reward.value if score.revision_reward else None),
                wording.count(score.revision.n),
            )
        )
        for _, score in sorted(scores.items())
        if score.revision
    ]
    return Table(columns, (*rows, *unfinished_rows(columns, [item for item in pending if item.name == "test"])))


def _sets_table(scores: Sequence[IterationScore], pending: Sequence[UnfinishedEvaluation]) -> Table:
    columns = (
        Column("Model", "text"),
        Column("Set", "text"),
        Column("Success %"),
        Column("95% interval"),
        Column("Against base (95% interval)"),
        Column("Episodes"),
    )
    rows = [
        _set_row(name, score, set_score.success, set_score.versus_base)
        for name in single_episode_sets(scores)
        for score in scores
        if (set_score := score.score_of_set(name))
    ]
    rows += [_set_row("revision test", score, score.revision, None) for score in scores if score.revision]
    rows += [
        _set_row(f"{set_score.name}, pass@{pass_at_k.k}", score, pass_at_k.success, None)
        for score in scores
        for set_score in score.sets
        for pass_at_k in (*set_score.pass_at[:1], *set_score.pass_at[1:][-1:])
    ]
    return Table(columns, (*rows, *unfinished_rows(columns, pending)))


def _set_row(name: str, score: IterationScore, success: Estimate, versus_base: Estimate | None) -> Row:
    return Row(
        (
            wording.model_name(score),
            name,
            wording.percent(success.value),
            wording.interval(success),
            gain_cell(versus_base),
            wording.count(success.n),
        )
    )
