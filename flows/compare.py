"""Compare methods: each arm with each seed is trained on its share of one pool of trajectories, or
as a whole run of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from agentr_core.errors import ArmsFailed, ConfigError, DataFault, ErrorBudgetSpent, TrainingFault
from agentr_core.methods.comparison import Arm, arms_of, sample_recipes, with_arms
from agentr_core.methods.table import method_of, plan_of
from agentr_core.recipes.recipe import Recipe
from flows.flywheel import evaluate_base_model, run_iteration, run_iterations
from flows.parameters import Absent, Overrides, cancel_if_busy, fail_on_unknown_parameters, run_name
from flows.preflight.checks import check
from tasks import reporting, runs
from tasks import stages as steps
from tasks.progress import print_line
from tasks.wiring import load_recipe, run_reference


@flow(name="compare", flow_run_name=run_name, on_crashed=[fail_on_unknown_parameters])
@cancel_if_busy
async def compare(
    recipe: str, overrides: Overrides = (), arms: Sequence[str] | Absent = (), seeds: Sequence[int] | Absent = ()
) -> dict[str, Any]:
    """Compare the arms of a recipe; return the id of the comparison, its table and the path of its
    report.

    Args:
        recipe: name of a shipped recipe, or path of a file.
        overrides: any field of the recipe, each as `section.field=value`.
        arms: only these of the recipe's arms.
        seeds: these instead of the recipe's seeds.

    Raises `UserError`, listing everything that prevents the comparison, before a model is asked
    anything.
    """
    comparison_recipe = load_comparison(Path(recipe), overrides or [], arms or [], seeds or [])
    for run_recipe in (comparison_recipe, *sample_recipes(comparison_recipe)):
        for note in check(run_recipe):
            print_line(note)
    return await run_arms(comparison_recipe)


def load_comparison(
    path: Path, overrides: Sequence[str], arms: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Recipe:
    """Return the recipe of a comparison, with only the given arms and with the given seeds instead
    of its own; empty: as the recipe says.

    Raises `ConfigError` if the recipe is not a comparison, or has no such arm.
    """
    changes = [*overrides, f"compare.seeds={list(seeds)}"] if seeds else overrides
    recipe = load_recipe(path, changes)
    method = method_of(recipe)
    if method.flow != "compare":
        raise ConfigError(f"recipe {path} is of method {method.name} and has no arms; run it with `agentr run`")
    return with_arms(recipe, arms) if arms else recipe


async def run_arms(recipe: Recipe) -> dict[str, Any]:
    """Run a parsed comparison within a flow run; return its `run_id`, the `table` of the arms'
    scores and the path of the `report`.

    Results that the store already has are not made again. An arm that fails does not stop the
    others.

    Raises:
        RunBusy: another process is working on the same comparison, or on one of its arms.
        ArmsFailed: some arms failed, after all others and the report were finished.
    """
    pool = run_reference(recipe)
    with runs.run_locked(pool):
        await steps.start(pool, recipe)
        async with runs.status_recorded(pool):
            await evaluate_base_model(pool, recipe)
            if plan_of(recipe, 1).stages:
                await run_iteration(pool, recipe, 1)
            arms, complete_runs = arms_of(recipe, pool.run_id), set[str]()
            failures = [
                f"{_title(arm)}: {fault}" for arm in arms if (fault := await _fault_of(arm, complete_runs)) is not None
            ]
            report, table = await reporting.comparison_report(pool)
            if failures:
                print_line(table)
                raise ArmsFailed(
                    f"{len(failures)} of {len(arms)} runs of the comparison could not be made ({'; '.join(failures)}); "
                    f"the report {report} has the others, and the same command tries these again"
                )
    return {"run_id": pool.run_id, "table": table, "report": report}


def _title(arm: Arm) -> str:
    return f"arm {arm.name}, seed {arm.seed}"


async def _fault_of(arm: Arm, complete_runs: set[str]) -> Exception | None:
    """Train an arm; return None, or the fault of its data or training that prevented it, which is
    also printed.

    `complete_runs` holds the ids of the runs whose samples are complete; runs that this arm
    completes are added.
    """
    try:
        await _train_arm(arm, complete_runs)
    except (DataFault, TrainingFault, ErrorBudgetSpent) as fault:
        print_line(f"{_title(arm)} cannot be made, the others continue: {fault}")
        return fault
    return None


async def _train_arm(arm: Arm, complete_runs: set[str]) -> None:
    print_line(f"{_title(arm)}: run {run_reference(arm.recipe).run_id}")
    if arm.is_whole_run:
        await run_iterations(arm.recipe)
        return
    if arm.samples_recipe is not None and (samples_run_id := arm.recipe.compare.samples) not in complete_runs:
        print_line(f"{_title(arm)}: its samples are made in run {samples_run_id}")
        await _iterate_once(arm.samples_recipe)
        complete_runs.add(samples_run_id)
    await _iterate_once(arm.recipe)


async def _iterate_once(recipe: Recipe) -> None:
    """Run the single iteration of the run of an arm, or of one that makes an arm's samples. Its
    iteration 0 is ended without an evaluation: the comparison evaluates the model that all start
    with.
    """
    run = run_reference(recipe)
    with runs.run_locked(run):
        await steps.start(run, recipe)
        async with runs.status_recorded(run):
            await steps.end(run, 0)
            await run_iteration(run, recipe, 1)
