"""The comparison: each arm with each seed, trained on what it takes from one pool of trajectories,
or as a whole run of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from agentr_core.errors import ConfigError
from agentr_core.methods.comparison.arms import Arm, arms_of, chosen
from agentr_core.methods.table import method_of, plan_of
from agentr_core.recipes import Recipe
from flows.flywheel import iterate, prepare, turn
from flows.preflight.checks import check
from tasks import reporting, runs
from tasks import stages as steps
from tasks.progress import tell
from tasks.wiring import load_recipe, reference


@flow(name="compare", flow_run_name="{recipe}")
async def compare(
    recipe: str, overrides: list[str] | None = None, arms: list[str] | None = None, seeds: list[int] | None = None
) -> dict[str, Any]:
    """Compare the arms of a recipe; return the id of the comparison, its table and the path of its
    report.

    Args:
        recipe: path of the recipe file.
        overrides: any field of the recipe, each as `section.field=value`.
        arms: only these of the recipe's arms.
        seeds: these instead of the recipe's seeds.

    Raises `UserError`, listing everything that prevents the comparison, before a model is asked
    anything.
    """
    parsed = comparison(Path(recipe), overrides or [], arms or [], seeds or [])
    check(parsed)
    return await run_arms(parsed)


def comparison(path: Path, overrides: Sequence[str], arms: Sequence[str] = (), seeds: Sequence[int] = ()) -> Recipe:
    """Return the recipe of a comparison with some of its arms, or other seeds.

    Raises `ConfigError` for a recipe that compares nothing, or has no such arm.
    """
    changes = [*overrides, f"compare.seeds={list(seeds)}"] if seeds else overrides
    recipe = load_recipe(path, changes)
    method = method_of(recipe)
    if method.flow != "compare":
        raise ConfigError(f"recipe {path} is of method {method.name} and has no arms; run it with `agentr run`")
    return chosen(recipe, arms) if arms else recipe


async def run_arms(recipe: Recipe) -> dict[str, Any]:
    """Run a parsed comparison within a flow run. What is done is found in the store.

    Raises `RunBusy` when another process is working on the same comparison, or on one of its arms.
    """
    pool = reference(recipe)
    with runs.locked(pool):
        await steps.start(pool, recipe)
        async with runs.recorded(pool):
            await prepare(pool, recipe)
            if plan_of(recipe, 1).stages:
                await iterate(pool, recipe, 1)
            for arm in arms_of(recipe, pool.run_id):
                await _learn(arm)
            report = await reporting.compared(pool)
    return {"run_id": pool.run_id, "table": reporting.arm_table(pool), "report": report}


async def _learn(arm: Arm) -> None:
    run = reference(arm.recipe)
    tell(f"arm {arm.name}, seed {arm.seed}: run {run.run_id}")
    if arm.whole:
        await turn(arm.recipe)
        return
    with runs.locked(run):
        await steps.start(run, arm.recipe)
        async with runs.recorded(run):
            await iterate(run, arm.recipe, 1)
