"""Write reports to the workspace, and publish them as artifacts in Prefect's UI."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from agentr_core.errors import ConfigError
from agentr_core.methods.comparison.report import build_comparison
from agentr_core.reports import leaderboard, wording
from agentr_core.reports.comparison import ComparisonReport, group_means_table
from agentr_core.reports.comparison import scores_table as arm_scores
from agentr_core.reports.document import VIEWER_URL, IterationReport, report_name, report_path
from agentr_core.reports.html import render_comparison, render_html, render_index, render_runs
from agentr_core.reports.markdown import (
    render_comparison_markdown,
    render_markdown,
    render_run_markdown,
    render_runs_markdown,
    table_markdown,
)
from agentr_core.reports.model_card import summary_markdown, summary_table, table_text
from agentr_core.reports.run_page import modes_table, paired_table
from agentr_core.runtime.context import RunContext
from agentr_core.stages.report import (
    Scoreboard,
    build_outline,
    build_report,
    build_runs,
    finished_at,
    promoted_model,
    recipe_differences,
    role_labels,
    with_run_sections,
    world_comparison,
)
from agentr_core.store.database import read_consistently
from agentr_core.store.queries.datasets import finished_evaluations
from agentr_core.store.queries.runs import run_state, run_versions, stage_seconds, trained_iteration_numbers
from agentr_core.system import write_text
from tasks.wiring import RunRef, quiet_context, viewer_address, viewer_page
from tasks.workspaces import find_run

T = TypeVar("T")


@task(task_run_name="report-{iteration}", cache_policy=NO_CACHE, persist_result=False)
async def report(run: RunRef, iteration: int) -> str:
    """Write the report of an iteration and the index; return the path of the HTML file."""
    (path, _), iteration_report = _write_pages(run, [iteration], viewer=viewer_address() or VIEWER_URL)
    # Prefect allows no dot in the key of an artifact.
    name = f"{iteration_report.recipe_name.replace('.', '-')}-{run.run_id[:8]}"
    await acreate_markdown_artifact(
        key=f"scores-{name}",
        markdown=f"{_viewer_link(run)}{summary_markdown([iteration_report])}",
        description=f"Held-out success up to iteration {iteration}",
    )
    await _publish_page(run, path, key=f"report-{name}-{iteration}", description=f"Report of iteration {iteration}")
    return str(path)


@task(task_run_name="report", cache_policy=NO_CACHE, persist_result=False)
async def comparison_report(run: RunRef) -> tuple[str, str]:
    """Write the report of a comparison; return the path of the HTML file, and the scores of the
    arms as text for a terminal.
    """
    path, comparison = _write_comparison(run)
    scores, name = arm_scores(comparison), f"{comparison.recipe_name.replace('.', '-')}-{run.run_id[:8]}"
    await acreate_markdown_artifact(
        key=f"arms-{name}", markdown=table_markdown(scores), description="Held-out scores of each arm"
    )
    await _publish_page(run, path, key=f"comparison-{name}", description="Report of the comparison")
    return str(path), table_text(scores)


async def _publish_page(run: RunRef, page: Path, *, key: str, description: str) -> None:
    """Publish a report as a Prefect artifact: a link to its page in a viewer, followed by the text
    of its Markdown file.
    """
    text = page.with_suffix(".md").read_text(encoding="utf-8")
    viewer = viewer_address()
    address = f"{viewer or VIEWER_URL}{report_path(run.run_id, page.stem)}"
    hint = "" if viewer else f", while `agentr view -w {shlex.quote(str(Path(run.workspace).resolve()))}` runs"
    await acreate_markdown_artifact(
        key=key,
        markdown=f"{_viewer_link(run)}As a page: [{address}]({address}){hint}\n\n{text}",
        description=description,
    )


def _viewer_link(run: RunRef) -> str:
    """Return a line with a link to a run's page of the viewer; the empty string without a
    viewer.
    """
    address = viewer_page("run", run.run_id)
    return f"In the viewer: [{address}]({address})\n\n" if address else ""


def _write_comparison(run: RunRef) -> tuple[Path, ComparisonReport]:
    comparison = _read_snapshot(run, build_comparison)
    html = report_folder(run) / "comparison.html"
    write_text(html, render_comparison(comparison))
    write_text(html.with_suffix(".md"), render_comparison_markdown(comparison))
    return html, comparison


def _write_pages(run: RunRef, iterations: Sequence[int], *, viewer: str) -> tuple[list[Path], IterationReport]:
    """Write the reports of some iterations of a run, and the page of the whole run; return the
    paths of the HTML files, that of the run last, and the last report.

    Args:
        viewer: where `agentr view` shows the workspace; empty for pages without links there.
    """
    folder = report_folder(run)

    def read(ctx: RunContext) -> tuple[list[IterationReport], list[IterationReport]]:
        board = Scoreboard(ctx)
        reports = [build_report(ctx, iteration, board, viewer=viewer) for iteration in iterations]
        earlier = (i for i in _iterations_with_checkpoint(ctx) if (folder / f"{report_name(i)}.html").exists())
        page_iterations = sorted({*earlier, *iterations})
        outlines = [build_outline(ctx, iteration, board, viewer=viewer) for iteration in page_iterations]
        return reports, [*outlines[:-1], with_run_sections(ctx, outlines[-1])]

    reports, pages = _read_snapshot(run, read)
    paths = []
    for iteration_report in reports:
        html = folder / f"{report_name(iteration_report.iteration)}.html"
        write_text(html, render_html(iteration_report))
        write_text(html.with_suffix(".md"), render_markdown(iteration_report))
        paths.append(html)
    index = folder / "index.html"
    write_text(index, render_index(pages))
    write_text(index.with_suffix(".md"), render_run_markdown(pages))
    return [*paths, index], reports[-1]


def _read_snapshot(run: RunRef, read: Callable[[RunContext], T]) -> T:
    """Call `read` with a context whose store is one snapshot, and return its result: all its
    queries see the same state, and the file is opened only once for dozens of them.

    If `read` stores rows itself, such as verdicts of an oracle, it is called again and sees them.
    """
    ctx = quiet_context(run)
    return read_consistently(ctx.store, lambda state: read(replace(ctx, store=state)))


def write_reports(workspace: Path, prefix: str, *, viewer: str = VIEWER_URL) -> list[Path]:
    """Write all reports of the run whose id begins with `prefix`; return the paths of the HTML
    files, with the page of the whole run last.

    Args:
        viewer: where `agentr view` shows the workspace; empty for pages without links there.

    Raises `ConfigError` if there is no such run, or several, or nothing to report.
    """
    run = RunRef(workspace=str(workspace), run_id=find_run(workspace, prefix))
    ctx = quiet_context(run)
    if ctx.recipe.compare.arms:
        return [_write_comparison(run)[0]]
    finished_iterations = _iterations_with_checkpoint(ctx)
    # A run that only evaluates a model has the page of that model.
    if not finished_iterations and not finished_evaluations(ctx.store, run.run_id, after=-1):
        raise ConfigError(
            f"run {run.run_id} has neither trained nor evaluated a model yet, so there is nothing to report; let it "
            "go on"
        )
    return _write_pages(run, finished_iterations or [0], viewer=viewer)[0]


def compare_runs(workspace: Path, prefixes: Sequence[str], *, viewer: str = VIEWER_URL) -> tuple[str, Path]:
    """Write a page that compares runs; return its tables as text for a terminal, and its path.

    Differences are relative to the first run; runs that differ only in their seed are also averaged
    as a group. Each prefix is the beginning of a run's id. Raises `ConfigError` if there is no such
    run, or one has no evaluated model.
    """
    ids = [find_run(workspace, prefix) for prefix in prefixes]
    contexts = [quiet_context(RunRef(workspace=str(workspace), run_id=run_id)) for run_id in ids]
    runs_report = build_runs(contexts, viewer=viewer)
    html = workspace / "reports" / f"{'-'.join(run_id[:8] for run_id in ids)}.html"
    write_text(html, render_runs(runs_report))
    write_text(html.with_suffix(".md"), render_runs_markdown(runs_report))
    tables = [paired_table(runs_report), *([group_means_table(runs_report.means)] if runs_report.means else [])]
    return "\n".join(map(table_text, tables)), html


def add_to_leaderboard(workspace: Path, prefix: str, page: Path) -> str:
    """Add the last scores of the run whose id begins with `prefix` to the leaderboard in the
    Markdown file `page`; return the whole table as text for a terminal.

    Raises `ConfigError` if there is no such run, if it compares arms or has not finished, and what
    `leaderboard.add_entry` raises.
    """
    run = RunRef(workspace=str(workspace), run_id=find_run(workspace, prefix))

    def read(ctx: RunContext) -> leaderboard.Entry:
        state = run_state(ctx.store, run.run_id)
        if state is None or state.status != "finished" or ctx.recipe.compare.arms:
            raise ConfigError(
                f"run {run.run_id} has not finished, or compares arms; a leaderboard takes runs that went to their end"
            )
        last = max([0, *_iterations_with_checkpoint(ctx)])
        scores = replace(_score_report(ctx, last, Scoreboard(ctx)), versions=run_versions(ctx.store, ctx.run_id))
        seconds = sum(stage_seconds(ctx.store, run.run_id).values())
        return leaderboard.entry_of(scores, seed=ctx.recipe.seed, seconds=seconds)

    return table_text(leaderboard.add_entry(page, _read_snapshot(run, read)))


def compare_worlds(workspace: Path, prefix: str, single_prefixes: Sequence[str]) -> str:
    """Return the held-out scores of a run of several worlds next to those of runs of one world
    each, as text for a terminal. `prefix` and `single_prefixes` are the beginnings of their ids.

    Raises `ConfigError` if there is no such run, or if the worlds or instances do not match.
    """
    ctx, *single_contexts = (
        quiet_context(RunRef(workspace=str(workspace), run_id=find_run(workspace, run_prefix)))
        for run_prefix in (prefix, *single_prefixes)
    )
    scores, worlds = world_comparison(ctx, single_contexts), ctx.recipe.world_names
    sections = [
        f"Mean reward {wording.TIMES}100\n{table_text(modes_table(scores, 'reward', worlds))}",
        f"Success %\n{table_text(modes_table(scores, 'success', worlds))}",
        "".join(f"{line}\n" for line in recipe_differences(ctx, single_contexts)),
    ]
    return "\n".join(filter(None, sections)).rstrip("\n")


def score_table(run: RunRef) -> str:
    """Return a table of the held-out success of each iteration of a run, as text for a terminal."""

    def read(ctx: RunContext) -> IterationReport:
        return _score_report(ctx, max([0, *_iterations_with_checkpoint(ctx)]), Scoreboard(ctx))

    return summary_table([_read_snapshot(run, read)])


def report_folder(run: RunRef) -> Path:
    """Return the folder of a run's reports."""
    return Path(run.workspace) / "reports" / run.run_id


def _iterations_with_checkpoint(ctx: RunContext) -> list[int]:
    """Return the numbers of a run's iterations that made a checkpoint, without 0, in order."""
    return trained_iteration_numbers(ctx.store, ctx.run_id)


def _score_report(ctx: RunContext, iteration: int, board: Scoreboard) -> IterationReport:
    """Return a report that has the scores up to an iteration but no other parts, for tables."""
    return IterationReport(
        recipe_name=ctx.recipe.name,
        run_id=ctx.run_id,
        iteration=iteration,
        date=finished_at(ctx, iteration),
        environment=", ".join(ctx.recipe.world_names),
        model=ctx.recipe.model.label,
        roles=role_labels(ctx.recipe),
        scores=board.up_to(iteration),
        unfinished_evaluations=board.unfinished(iteration),
        promoted=promoted_model(ctx, iteration),
    )
