"""A whole run without Prefect: the stages of the wheel in their order, at three fifths of its cost.

That Prefect's flows do the same, whatever the method, is for tests/flows/test_flywheel.py to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentr_core.runtime.alarms import check_stage
from agentr_core.runtime.start import begin, end, finish, start
from agentr_core.store.database import Store
from flows.preflight.checks import check
from tasks.reporting import score_table, write_reports
from tasks.wiring import load_recipe, quiet_workplace, reference


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
    run = reference(recipe)
    place = quiet_workplace(run, recipe)
    with place.store.kept_open():
        await start(place)
        for iteration in range(recipe.iterations + 1):
            if iteration:
                await begin(place, iteration)
            for stage in place.plan(iteration).stages:
                await stage.work(place, iteration)
                check_stage(place, iteration, stage)
            await end(place, iteration)
        await finish(place, "finished")
    *_, report, _ = write_reports(place.root, run.run_id)
    return Turned(run.run_id, place.store, report, score_table(run))
