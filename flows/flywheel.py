"""The wheel: evaluate the base model; then make data, build, train, evaluate, report, over and over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from agentr_core.config import Recipe, replace
from agentr_core.errors import ConfigError
from flows import stages
from tasks import reporting, runs
from tasks import stages as steps
from tasks.checks import check
from tasks.wiring import RunRef, load_recipe, reference


@flow(name="flywheel", flow_run_name="{recipe}")
async def flywheel(recipe: str, overrides: list[str] | None = None, iterations: int | None = None) -> dict[str, Any]:
    """Run a recipe; return the run's id, the table of its scores and the path of its last report.

    Args:
        recipe: path of the recipe file.
        overrides: `section.field=value`, each.
        iterations: how far to turn the wheel; the recipe says it otherwise.

    Raises `UserError` with all that stands against the run, before anything is asked of a model.
    """
    parsed = load_recipe(Path(recipe), overrides or [])
    check(parsed)
    return await turn(replace(parsed, iterations=iterations) if iterations else parsed)


async def turn(recipe: Recipe) -> dict[str, Any]:
    """Run a parsed recipe within a flow run. Stages that are done find their work in the store.

    Raises `RunBusy` when another process is at the same run, and `ConfigError` for a comparison.
    """
    if recipe.method == "compare":
        raise ConfigError(f"recipe {recipe.name} compares arms; run it with `agentr compare`, or the flow `compare`")
    run = reference(recipe)
    with runs.alone(run):
        return await _turn(run, recipe)


def construction(recipe: Recipe, iteration: int) -> list[Any]:
    """Return the stages that make the data of an iteration, in their order."""
    phase = recipe.phase(iteration)
    if phase is None:
        return [
            *([stages.collect] if recipe.data.use != "expert" else []),
            *([stages.critique] if recipe.data.use in ("revision", "both") else []),
            stages.splice,
        ]
    if phase == "sft":
        return [stages.demonstrate]
    if phase == "rft":
        return [*([stages.demonstrate] if recipe.eto.clones(iteration) else []), stages.explore]
    made = recipe.eto.preferences
    if made.source != "exploration":
        return [stages.prefer]
    return [*([stages.demonstrate] if made.against == "expert" else []), stages.explore, stages.prefer]


async def iterate(run: RunRef, iteration: int, constructs: Sequence[Any]) -> None:
    """Make the data of an iteration by the given stages, build its dataset, train on it and evaluate."""
    await steps.begin(run, iteration)
    for construct in constructs:
        await construct(run.run_id, iteration, run.workspace)
    await stages.dataset(run.run_id, iteration, run.workspace)
    await stages.train(run.run_id, iteration, run.workspace)
    await stages.evaluate(run.run_id, iteration, run.workspace)
    await steps.end(run, iteration)


async def _turn(run: RunRef, recipe: Recipe) -> dict[str, Any]:
    await steps.start(run, recipe)
    async with runs.kept(run):
        await stages.evaluate(run.run_id, 0, run.workspace)
        await steps.end(run, 0)
        report = ""
        for iteration in range(1, recipe.iterations + 1):
            await iterate(run, iteration, construction(recipe, iteration))
            report = await stages.report(run.run_id, iteration, run.workspace)
    return {"run_id": run.run_id, "table": reporting.score_table(run), "report": report}
