"""Reports as Markdown (GitHub's dialect): the numbers and transcripts of the HTML page without its
drawings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentr_core.reports import comparison, document, run_page, wording
from agentr_core.reports.document import IterationReport, RevisionExample, reports_of_one_run
from agentr_core.reports.iteration import sections

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
_ALIGN = {"text": ":--", "code": ":--", "number": "--:", "meter": "--:"}


def render_markdown(report: IterationReport) -> str:
    """Return a report as Markdown; texts from models stand in fenced blocks that they cannot
    close.
    """
    roles = "".join(f" · {escape(role)}: {escape(model)}" for role, model in report.roles.items())
    head = (
        f"# {escape(report.recipe_name)}, {escape(wording.report_title(report))}\n\n"
        f"Run {_code(report.run_id)} · {escape(report.environment)} · {escape(report.model)}{roles} · "
        f"{escape(report.date)}\n"
    )
    return head + "".join(_section(section) for section in sections(report))


def render_comparison_markdown(report: comparison.ComparisonReport) -> str:
    """Return a comparison as Markdown."""
    head = (
        f"# {escape(report.recipe_name)}, comparison\n\n"
        f"Run {_code(report.run_id)} · {escape(report.environment)} · {escape(report.model)} · {escape(report.date)}\n"
    )
    return head + "".join(_section(section) for section in comparison.sections(report))


def render_run_markdown(reports: Sequence[IterationReport]) -> str:
    """Return the page of a whole run as Markdown. Raises `ValueError` unless all reports are of
    one run.
    """
    last = reports_of_one_run(reports)[-1]
    head = (
        f"# {escape(last.recipe_name)}, run\n\n"
        f"Run {_code(last.run_id)} · {escape(last.environment)} · {escape(last.model)} · {escape(last.date)}\n"
    )
    return head + "".join(_section(section) for section in run_page.sections(reports))


def render_runs_markdown(report: run_page.RunsReport) -> str:
    """Return a comparison of runs as Markdown."""
    head = f"# {escape(' and '.join(run.recipe_name for run in report.runs))}\n"
    return head + "".join(_section(section) for section in run_page.runs_sections(report))


def escape(text: str) -> str:
    """Return a text as one line that Markdown shows literally."""
    return _SPECIAL.sub(r"\\\1", " ".join(wording.escape_invisible(text).split()))


def table_markdown(table: document.Table) -> str:
    """Return a table with its numbers right-aligned; drawn columns are left out."""
    positions = [i for i, column in enumerate(table.columns) if not column.is_drawn]
    lines = [
        [escape(table.columns[i].title) for i in positions],
        [_ALIGN[table.columns[i].kind] for i in positions],
        *(
            [_cell(row.cells[i], row, table.columns[i], first=i == positions[0]) for i in positions]
            for row in table.rows
        ),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fence(text: str, language: str = "text") -> str:
    """Return a text in a fenced block whose fence is longer than any run of backticks in the
    text.
    """
    visible = wording.escape_invisible(text)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", visible)), default=0))
    return f"{ticks}{language}\n{visible}\n{ticks}\n"


def _section(section: document.Section) -> str:
    note = f"\n{escape(section.note)}\n" if section.note else ""
    return f"\n## {escape(section.title)}\n{note}" + "".join(
        f"\n{text}" for text in map(_block, section.blocks) if text
    )


def _block(block: document.Block) -> str:
    match block:
        case document.Headline():
            lines = [f"**{block.value}%** (95% interval {block.interval}, {block.episodes} episodes)\n\n"]
            for delta in block.deltas:
                bounds = f" ({delta.interval})" if delta.interval else ""
                lines.append(f"- **{delta.text}** points against {delta.against}{bounds}\n")
            return "".join(lines) + (f"\n{escape(block.conclusion)}\n" if block.conclusion else "")
        case document.Table():
            return table_markdown(block)
        case document.Figure():
            return "\n".join(map(_block, block.fallback))
        case document.Paragraph():
            return f"{escape(block.text)}\n"
        case document.Stack() | document.Legend():
            return ""
        case document.Listing():
            return fence(block.text, block.language)
        case document.Transcripts():
            return "\n".join(_example(number, example) for number, example in enumerate(block.examples, 1))


def _cell(cell: document.Cell, row: document.Row, column: document.Column, *, first: bool) -> str:
    match cell:
        case document.Meter():
            return f"{escape(cell.text)} ({escape(cell.note)})"
        case document.EstimateText():
            return escape(str(cell))
        case document.Link():
            text = _code(cell.text) if column.kind == "code" else escape(cell.text)
            return f"[{text}](<{cell.address}>)" if cell.address else text
        case str():
            text = _code(cell) if column.kind == "code" and cell else escape(cell)
            if first and row.tone == "minor":
                return f"· {text}"
            return f"**{text}**" if first and row.tone == "strong" else text
        case _:
            return ""


def _code(text: str) -> str:
    visible = " ".join(wording.escape_invisible(text).split())
    return f"`{visible}`" if "`" not in visible and "|" not in visible else escape(visible)


def _example(number: int, example: RevisionExample) -> str:
    live = f", {example.live_reward:.2f} live" if example.live_reward is not None else ""
    text = (
        f"### {number}. {escape(example.instance)}\n\n"
        f"Sample {_code(example.sample_id)} of tree {_code(example.tree_id)}: reward {example.bad_reward:.2f} "
        f"to {example.good_reward:.2f}{live}; split after step {example.split}, cut after step {example.cut}.\n"
    )
    if example.diagnosis:
        text += f"\nTold after the cut while it was sampled, and not trained:\n\n{fence(example.diagnosis)}"
    for turn in example.turns:
        labels = [f"**{turn.role}**"]
        if turn.role == "assistant":
            labels.append(wording.PART_NAMES[turn.part])
        if turn.train:
            labels.append("**trained**")
        if turn.first_error:
            labels.append("**first error**")
        if turn.verdict:
            labels.append(f"judged {escape(turn.verdict)}")
        text += "\n" + " · ".join(labels) + "\n\n" + fence(turn.text)
        if turn.judge_reply:
            text += f"\nReply of the judge:\n\n{fence(turn.judge_reply)}"
    return text
