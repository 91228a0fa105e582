"""The flywheel in two halves: gather experience with the policy of a run, and train on it. If
another program does the training, `import_trained_weights` imports its weights.

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
from flows.flywheel import evaluate_base_model, run_iteration
from flows.parameters import (
    UNCHANGED,
    Absent,
    Enough,
    Overrides,
    Settings,
    Units,
    cancel_if_busy,
    fail_on_unknown_parameters,
    merged_overrides,
    run_name,
)
from flows.preflight.checks import check
from tasks import experience, reporting, runs
from tasks import stages as steps
from tasks.progress import print_line
from tasks.wiring import load_recipe, run_reference


@flow(name="collect-only", flow_run_name=run_name, on_crashed=[fail_on_unknown_parameters])
@cancel_if_busy
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

    Raises `UserError` as `gather_experience` does, or listing everything that prevents the
    gathering.
    """
    all_overrides = merged_overrides(settings, overrides)
    run_recipe = load_recipe(Path(recipe), all_overrides)
    for note in check(run_recipe, trains=False):
        print_line(note)
    return await gather_experience(
        run_recipe,
        limit=limit or None,
        enough=enough,
        training_parameters={"recipe": recipe, "overrides": all_overrides},
    )


@flow(name="improve", flow_run_name=run_name, on_crashed=[fail_on_unknown_parameters])
@cancel_if_busy
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
    run_recipe = load_recipe(Path(recipe), merged_overrides(settings, overrides))
    for note in check(run_recipe):
        print_line(note)
    return await train_on_gathered(run_recipe, enough=enough)


async def gather_experience(
    recipe: Recipe, *, limit: int | None = None, enough: int = 1, training_parameters: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run the stages that gather experience for the first unfinished iteration of a recipe's run,
    within a flow run. Return `run_id`, `iteration`, and how many `trajectories` the iteration has
    and how many of them are `new`.

    Args:
        limit: the most trees, episodes or questions that each stage begins; None: all.
        enough: how many trajectories are enough to train on, for the event that is sent.
        training_parameters: the parameters with which `improve` finds the same recipe, for the
        event.

    Raises `RunBusy` if another process is working on the same run, and `ConfigError` if the
    iteration gathers nothing before it trains, as in group RL.
    """
    run = run_reference(recipe)
    with runs.run_locked(run):
        iteration = experience.unfinished_iteration(run, recipe)
        stage_names = _gathering_stage_names(recipe, iteration)
        await steps.start(run, recipe, collects=True)
        if recipe.promote == "best":
            await evaluate_base_model(run, recipe)
        num_trajectories_before = experience.count_gathered(run, recipe, iteration)
        plan = plan_of(recipe, iteration)
        # With a limit, more will be gathered; a stage that chooses among all of it runs only once.
        for name in stage_names if limit is None else [name for name in stage_names if not plan.stage(name).chooses]:
            await steps.perform(run, iteration, name, limit=limit)
        num_trajectories = experience.report_collected(
            run, recipe, iteration, enough=enough, training_parameters=training_parameters or {}
        )
    return {
        "run_id": run.run_id,
        "iteration": iteration,
        "trajectories": num_trajectories,
        "new": num_trajectories - num_trajectories_before,
    }


async def train_on_gathered(recipe: Recipe, *, enough: int = 1) -> dict[str, Any]:
    """Train the first unfinished iteration of a recipe's run on what was gathered for it, evaluate
    and report it, within a flow run.

    Return `run_id`, `iteration`, the number of `trajectories` and whether the iteration was
    `trained`, which needs `enough` trajectories; if so, also `table` and `report` as
    `run_iterations` does. Raises as `gather_experience` does.
    """
    run = run_reference(recipe)
    with runs.run_locked(run):
        iteration = experience.unfinished_iteration(run, recipe)
        stage_names = _gathering_stage_names(recipe, iteration)
        num_trajectories = experience.count_gathered(run, recipe, iteration)
        result = {"run_id": run.run_id, "iteration": iteration, "trajectories": num_trajectories}
        if num_trajectories < enough:
            get_run_logger().info(
                f"iteration {iteration} of run {run.run_id} has {num_trajectories} of {enough} trajectories; "
                "nothing is trained"
            )
            return {**result, "trained": False}
        goal_recipe = replace(recipe, iterations=iteration)
        await steps.start(run, goal_recipe)
        async with runs.status_recorded(run):
            await evaluate_base_model(run, goal_recipe)
            for stage in plan_of(goal_recipe, iteration).stages:
                if stage.name not in stage_names or not stage.gathers:
                    await stages.flow_of_stage(stage.name)(run.run_id, iteration, run.workspace)
            await steps.end(run, iteration)
            report = await reporting.report(run, iteration)
    return {**result, "trained": True, "table": reporting.score_table(run), "report": report}


async def import_trained_weights(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Import the weights that another program trained, from `folder`, as the first unfinished
    iteration of a recipe's run; evaluate and report it, within a flow run.

    Return `run_id`, `iteration` and whether it is `new`; if so, also a sentence about the import
    (`told`), `table` and `report`. Files that were imported before change nothing; if they have
    changed, they become another iteration.

    Raises `RunBusy` if another process is working on the same run, and `UserError` if the training
    does not fit the run.
    """
    run = run_reference(recipe)
    with runs.run_locked(run):
        training, iteration, is_finished = experience.read_outside(run, recipe, folder)
        result = {"run_id": run.run_id, "iteration": iteration, "new": not is_finished}
        if is_finished:
            return result
        goal_recipe = replace(recipe, iterations=iteration)
        note = experience.import_weights(run, goal_recipe, iteration, training)
        await steps.start(run, goal_recipe)
        async with runs.status_recorded(run):
            await evaluate_base_model(run, goal_recipe)
            await run_iteration(run, goal_recipe, iteration)
            report = await reporting.report(run, iteration)
    return {**result, "told": note, "table": reporting.score_table(run), "report": report}


def _gathering_stage_names(recipe: Recipe, iteration: int) -> tuple[str, ...]:
    """Return the names of the stages that gather experience for an iteration. Raises `ConfigError`
    if there are none.
    """
    method = method_of(recipe)
    gathering_stages = plan_of(recipe, iteration).gathering_stages if method.flow == "flywheel" else ()
    if not gathering_stages:
        raise ConfigError(
            f"iteration {iteration} of recipe {recipe.name} ({method.title}) gathers nothing before it trains; "
            f"run it with `agentr {'compare' if method.flow == 'compare' else 'run'}`"
        )
    return tuple(stage.name for stage in gathering_stages)
