"""The flywheel in two halves: gather experience with the policy of a run, and train on it. If
another program does the training, `take_back` imports its weights.

All work on the first unfinished iteration of the run, under the run's own id, so a later run of the
recipe finds what was gathered. Other runs that need the same trees and episodes of the same policy
copy them from the store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from agentr_core.errors import ConfigError
from agentr_core.methods.table import method_of, plan_of
from agentr_core.recipes.recipe import Recipe, replace
from flows import stages
from flows.flywheel import iterate, prepare
from flows.parameters import (
    UNCHANGED,
    Absent,
    Enough,
    Overrides,
    Settings,
    Units,
    cancelled_while_busy,
    changes,
    name_unknown,
    run_name,
)
from flows.preflight.checks import check
from tasks import experience, reporting, runs
from tasks import stages as steps
from tasks.progress import tell
from tasks.wiring import load_recipe, reference


@flow(name="collect-only", flow_run_name=run_name, on_crashed=[name_unknown])
@cancelled_while_busy
async def collect_only(
    recipe: str,
    overrides: Overrides = (),
    limit: Units = 0,
    enough: Enough = 1,
    settings: Settings | Absent = UNCHANGED,
) -> dict[str, Any]:
    """Gather experience for the iteration that a recipe's run is at, and train nothing; return the
    ids of run and iteration and how many trajectories there are.

    The event `agentr.trajectories.collected` says so, with the label `agentr.enough`.

    Args:
        recipe: name of a shipped recipe, or path of a file.
        overrides: advanced: any field of the recipe, each as `section.field=value`.
        limit: the most trees, episodes or questions to begin; 0 means all.
        enough: how many trajectories of the iteration are enough to train on.
        settings: the fields of the recipe that are changed most often.

    Raises `UserError` as `gather` does, or listing everything that prevents the gathering.
    """
    all_overrides = changes(settings, overrides)
    run_recipe = load_recipe(Path(recipe), all_overrides)
    for note in check(run_recipe, trains=False):
        tell(note)
    return await gather(
        run_recipe, limit=limit or None, enough=enough, again={"recipe": recipe, "overrides": all_overrides}
    )


@flow(name="improve", flow_run_name=run_name, on_crashed=[name_unknown])
@cancelled_while_busy
async def improve(
    recipe: str, overrides: Overrides = (), enough: Enough = 1, settings: Settings | Absent = UNCHANGED
) -> dict[str, Any]:
    """Train the iteration that a recipe's run is at on what was gathered for it, evaluate and
    report it; return what `flywheel` does and the number of trajectories.

    With fewer trajectories than `enough` nothing is done. Nothing is gathered in any case, so that
    an automation which waits for trajectories never starts itself.

    Args:
        recipe: name of a shipped recipe, or path of a file.
        overrides: advanced: any field of the recipe, each as `section.field=value`.
        enough: how many trajectories since the last training are worth another one.
        settings: the fields of the recipe that are changed most often.

    Raises `UserError`, listing everything that prevents the training.
    """
    run_recipe = load_recipe(Path(recipe), changes(settings, overrides))
    for note in check(run_recipe):
        tell(note)
    return await learn(run_recipe, enough=enough)


async def gather(
    recipe: Recipe, *, limit: int | None = None, enough: int = 1, again: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run the stages that gather experience for the first unfinished iteration of a recipe's run,
    within a flow run. Return `run_id`, `iteration`, and how many `trajectories` the iteration has
    and how many of them are `new`.

    Args:
        limit: the most trees, episodes or questions that each stage begins; None: all.
        enough: how many trajectories are enough to train on, for the event that is sent.
        again: the parameters with which `improve` finds the same recipe, for the event.

    Raises `RunBusy` if another process is working on the same run, and `ConfigError` if the
    iteration gathers nothing before it trains, as in group RL.
    """
    run = reference(recipe)
    with runs.locked(run):
        iteration = experience.iteration_of(run, recipe)
        stage_names = _gathering(recipe, iteration)
        await steps.start(run, recipe, collects=True)
        if recipe.promote == "best":
            await prepare(run, recipe)
        before = experience.gathered(run, recipe, iteration)
        plan = plan_of(recipe, iteration)
        # With a limit, more will be gathered; a stage that chooses among all of it runs only once.
        for name in stage_names if limit is None else [name for name in stage_names if not plan.stage(name).chooses]:
            await steps.perform(run, iteration, name, limit=limit)
        count = experience.collected(run, recipe, iteration, enough=enough, again=again or {})
    return {"run_id": run.run_id, "iteration": iteration, "trajectories": count, "new": count - before}


async def learn(recipe: Recipe, *, enough: int = 1) -> dict[str, Any]:
    """Train the first unfinished iteration of a recipe's run on what was gathered for it, evaluate
    and report it, within a flow run.

    Return `run_id`, `iteration`, the number of `trajectories` and whether the iteration was
    `trained`, which needs `enough` trajectories; if so, also `table` and `report` as `turn` does.
    Raises as `gather` does.
    """
    run = reference(recipe)
    with runs.locked(run):
        iteration = experience.iteration_of(run, recipe)
        stage_names = _gathering(recipe, iteration)
        count = experience.gathered(run, recipe, iteration)
        result = {"run_id": run.run_id, "iteration": iteration, "trajectories": count}
        if count < enough:
            get_run_logger().info(
                f"iteration {iteration} of run {run.run_id} has {count} of {enough} trajectories; nothing is trained"
            )
            return {**result, "trained": False}
        goal = replace(recipe, iterations=iteration)
        await steps.start(run, goal)
        async with runs.recorded(run):
            await prepare(run, goal)
            for stage in plan_of(goal, iteration).stages:
                if stage.name not in stage_names or not stage.gathers:
                    await stages.of(stage.name)(run.run_id, iteration, run.workspace)
            await steps.end(run, iteration)
            report = await reporting.report(run, iteration)
    return {**result, "trained": True, "table": reporting.score_table(run), "report": report}


async def take_back(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Import the weights that another program trained, from `folder`, as the first unfinished
    iteration of a recipe's run; evaluate and report it, within a flow run.

    Return `run_id`, `iteration` and whether it is `new`; if so, also a sentence about the import
    (`told`), `table` and `report`. Files that were imported before change nothing; if they have
    changed, they become another iteration.

    Raises `RunBusy` if another process is working on the same run, and `UserError` if the training
    does not fit the run.
    """
    run = reference(recipe)
    with runs.locked(run):
        training, iteration, is_finished = experience.read_outside(run, recipe, folder)
        result = {"run_id": run.run_id, "iteration": iteration, "new": not is_finished}
        if is_finished:
            return result
        goal = replace(recipe, iterations=iteration)
        note = experience.take_back(run, goal, iteration, training)
        await steps.start(run, goal)
        async with runs.recorded(run):
            await prepare(run, goal)
            await iterate(run, goal, iteration)
            report = await reporting.report(run, iteration)
    return {**result, "told": note, "table": reporting.score_table(run), "report": report}


def _gathering(recipe: Recipe, iteration: int) -> tuple[str, ...]:
    """Return the names of the stages that gather experience for an iteration. Raises `ConfigError`
    if there are none.
    """
    method = method_of(recipe)
    gathering = plan_of(recipe, iteration).gathering if method.flow == "flywheel" else ()
    if not gathering:
        raise ConfigError(
            f"iteration {iteration} of recipe {recipe.name} ({method.title}) gathers nothing before it trains; "
            f"run it with `agentr {'compare' if method.flow == 'compare' else 'run'}`"
        )
    return tuple(stage.name for stage in gathering)
