"""A whole run without Prefect: the stages of the wheel in their order, at three fifths of its cost.

That Prefect's flows do the same, whatever the method, is for tests/flows/test_flywheel.py to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentr_core.runtime.alarms import check_stage
from agentr_core.runtime.start import begin_iteration, end_iteration, finish_run, start_run
from agentr_core.store.database import Store
from flows.preflight.checks import check
from tasks.reporting import score_table, write_reports
from tasks.wiring import load_recipe, quiet_context, run_reference


@dataclass(frozen=True)
class Turned:
    """A run that is over, its last report, and its scores as a table."""

    run_id: str
    store: Store
    report: Path
    table: str


async def turn(file: Path, *overrides: str) -> Turned:
    """Check the recipe in a file, and run it to its end and its reports."""
    recipe = load_recipe(file, overrides)
    check(recipe)
    run = run_reference(recipe)
    ctx = quiet_context(run, recipe)
    with ctx.store.keep_open():
        await start_run(ctx)
        for iteration in range(recipe.iterations + 1):
            if iteration:
                await begin_iteration(ctx, iteration)
            for stage in ctx.plan(iteration).stages:
                await stage.work(ctx, iteration)
                check_stage(ctx, iteration, stage)
            await end_iteration(ctx, iteration)
        await finish_run(ctx, "finished")
    *_, report, _ = write_reports(ctx.root, run.run_id)
    return Turned(run.run_id, ctx.store, report, score_table(run))
