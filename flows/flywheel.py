"""The flywheel: evaluate the base model; then, in each iteration, gather data, build a dataset,
train, evaluate and report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from agentr_core.errors import ConfigError
from agentr_core.methods.table import method_of, plan_of
from agentr_core.recipes.recipe import Recipe, replace
from flows import stages
from flows.parameters import (
    UNCHANGED,
    Absent,
    Iterations,
    Overrides,
    Settings,
    cancel_if_busy,
    fail_on_unknown_parameters,
    merged_overrides,
    run_name,
)
from flows.preflight.checks import check
from tasks import reporting, runs
from tasks import stages as steps
from tasks.progress import print_line, run_progress
from tasks.wiring import RunRef, load_recipe, run_reference


@flow(name="flywheel", flow_run_name=run_name, on_crashed=[fail_on_unknown_parameters])
@cancel_if_busy
async def flywheel(
    recipe: str,
    overrides: Overrides = (),
    iterations: Iterations = 0,
    more: Iterations = 0,
    settings: Settings | Absent = UNCHANGED,
) -> dict[str, Any]:
    """Run a recipe; return the run's id, the table of its scores and the path of its last report.

    Args:
        recipe: name of a shipped recipe, or path of a file.
        overrides: advanced: any field of the recipe, each as `section.field=value`.
        iterations: how many iterations the run has in the end; 0: as many as the recipe says.
        more: how many iterations to add to those that the run has finished, as a nightly schedule
            does. A run that was interrupted is only taken to its end. 0: none.
        settings: the fields of the recipe that are changed most often.

    Raises `UserError`, listing everything that prevents the run, before a model is asked anything.
    """
    sources = [name for name, value in (("iterations", iterations), ("more", more)) if value]
    sources += [f"override {change}" for change in overrides or () if change.startswith("iterations=")]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)}: each says how far the run goes; give only one")
    run_recipe = load_recipe(Path(recipe), merged_overrides(settings, overrides))
    _check_flow(run_recipe)
    if more:
        run_recipe = runs.with_more_iterations(run_recipe, more)
    elif iterations:
        run_recipe = replace(run_recipe, iterations=iterations)
    for note in check(run_recipe):
        print_line(note)
    return await run_iterations(run_recipe)


async def run_iterations(recipe: Recipe) -> dict[str, Any]:
    """Run all iterations of a parsed recipe within a flow run; return the `run_id`, the `table` of
    its scores and the path of the last `report`. Results that the store already has are not made
    again.

    Raises `RunBusy` if another process is working on the same run.
    """
    run = run_reference(recipe)
    with runs.run_locked(run):
        await steps.start(run, recipe)
        async with runs.status_recorded(run):
            num_stages = sum(len(plan_of(recipe, number).stages) for number in range(recipe.iterations + 1))
            async with run_progress(recipe.name, num_stages):
                await evaluate_base_model(run, recipe)
                report = ""
                for iteration in range(1, recipe.iterations + 1):
                    await run_iteration(run, recipe, iteration)
                    # Called as a task of this flow, so its artifacts belong to the flow run that
                    # people look at, not to one of a stage.
                    report = await reporting.report(run, iteration)
        return {"run_id": run.run_id, "table": reporting.score_table(run), "report": report}


def _check_flow(recipe: Recipe) -> None:
    flow_name = method_of(recipe).flow
    if flow_name == "compare":
        raise ConfigError(f"recipe {recipe.name} compares arms; run it with `agentr compare`, or the flow `compare`")


async def evaluate_base_model(run: RunRef, recipe: Recipe) -> None:
    """Do what comes before the first iteration: evaluate the model that the run starts with."""
    await _run_stages(run, recipe, 0)
    await steps.end(run, 0)


async def run_iteration(run: RunRef, recipe: Recipe, iteration: int) -> None:
    """Run the stages of an iteration, counted from 1, in order."""
    await steps.begin(run, iteration)
    await _run_stages(run, recipe, iteration)
    await steps.end(run, iteration)


async def _run_stages(run: RunRef, recipe: Recipe, iteration: int) -> None:
    for stage in plan_of(recipe, iteration).stages:
        await stages.flow_of_stage(stage.name)(run.run_id, iteration, run.workspace)
