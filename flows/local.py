"""Run flows in this process, for the command line: no server has to be running, and progress is
shown on the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from rich.console import Console

from agentr_core.errors import ConfigError
from agentr_core.methods.comparison import arms_of
from agentr_core.methods.table import method_of, plans_of
from agentr_core.recipes.recipe import Recipe, replace
from flows import interruption, server
from flows.collecting import gather_experience, import_trained_weights, train_on_gathered
from flows.compare import load_comparison, run_arms
from flows.flywheel import evaluate_base_model, run_iterations
from flows.preflight.checks import check
from tasks import progress, reporting, runs, stages
from tasks.wiring import load_recipe, run_reference
from tasks.workspaces import find_run, stored_recipe

RESUMABLE = ("iterations=", "workspace=", "scale.", "alarms.")
"""Beginnings of the overrides that may be given with `--resume`."""


def run_recipe(path: Path, overrides: Sequence[str], *, resume: str | None = None, more: int | None = None) -> str:
    """Run a recipe; return its held-out scores, run id and report as text for the terminal. Raises
    `UserError` before anything is started if the recipe cannot be run.

    Args:
        resume: the beginning of the id of the run to continue; None: the recipe's own run.
        more: how many iterations to add to those that the run has finished; None: none.
    """
    recipe = load_recipe(path, list(overrides))
    if resume:
        recipe = _resumed_recipe(recipe, overrides, resume)
    flow_name = method_of(recipe).flow
    if flow_name == "compare":
        raise ConfigError(f"recipe {recipe.name} compares arms; run it with `agentr compare {path}`")
    if more:
        recipe = _with_more_iterations(recipe, overrides, more)
    result = _run(_flywheel, recipe)
    # The funnel begins with trees; a run on preference pairs, or of group RL alone, grows none.
    plans = plans_of(recipe)
    all_online = all(plan.training and plan.training.objective.row_type == "episodes" for plan in plans)
    has_pairs = any(plan.has_pairs for plan in plans)
    view = "v_preferences limit 10" if has_pairs else "v_rl_steps" if all_online else "v_funnel"
    return (
        f"\nHeld-out success\n{result['table']}\n"
        f"run     {result['run_id']}\nreport  {result['report']}\n"
        f'ask     agentr sql "select * from {view}" -w {shlex.quote(recipe.workspace)}'
    )


def _with_more_iterations(recipe: Recipe, overrides: Sequence[str], more: int) -> Recipe:
    """Return a recipe with `more` iterations added to those that its run has finished. Raises
    `ConfigError` if an override sets `iterations` as well.
    """
    override = next((change for change in overrides if change.startswith("iterations=")), None)
    if override is not None:
        raise ConfigError(f"--more {more} and -o {override} both say how far the run goes; give one of them")
    return runs.with_more_iterations(recipe, more)


def _resumed_recipe(recipe: Recipe, overrides: Sequence[str], resume: str) -> Recipe:
    """Return the recipe that the run `resume`, the beginning of its id, was started with, but with
    the workspace and scale of `recipe` and, if overridden, its number of iterations and its fields
    of `alarms`.

    Raises `ConfigError` for overrides that are not `RESUMABLE`, for a run of another recipe, and as
    `_check_same_run` does.
    """
    ignored_changes = [change for change in overrides if not change.startswith(RESUMABLE)]
    if ignored_changes:
        raise ConfigError(
            f"--resume goes on with the recipe the run began with, so -o {ignored_changes[0]} has no effect; "
            "leave it out, or begin a new run"
        )
    workspace = Path(recipe.workspace)
    run_id = find_run(workspace, resume)
    old_recipe = stored_recipe(workspace, run_id)
    if old_recipe.name != recipe.name:
        raise ConfigError(f"run {run_id} is of recipe {old_recipe.name}, and not of {recipe.name}; give its own recipe")
    overrides_iterations = any(change.startswith("iterations=") for change in overrides)
    iterations = recipe.iterations if overrides_iterations else old_recipe.iterations
    names = [change.partition("=")[0].removeprefix("alarms.") for change in overrides if change.startswith("alarms.")]
    alarms = dataclasses.replace(old_recipe.alarms, **{name: getattr(recipe.alarms, name) for name in names})
    return _check_same_run(
        run_id,
        replace(old_recipe, workspace=recipe.workspace, iterations=iterations, scale=recipe.scale, alarms=alarms),
    )


def _check_same_run(run_id: str, recipe: Recipe) -> Recipe:
    """Return `recipe`. Raises `ConfigError` if it no longer yields `run_id`, since the weights of
    its model, the fields that recipes have, or its environments have changed.
    """
    if run_reference(recipe).run_id != run_id:
        raise ConfigError(
            f"run {run_id} cannot go on: the weights in {recipe.model.label}, the fields that recipes have, or "
            f"what {', '.join(recipe.world_names)} says and reads are not those it began with; bring the model and "
            "the files back, or run the recipe anew"
        )
    return recipe


def import_training(folder: Path, workspace: Path, prefix: str) -> str:
    """Import weights that another program trained as an iteration of a run, evaluate them, and
    return the result as text. Raises `UserError` before anything is stored if they do not fit.

    Args:
        prefix: the beginning of the run's id; empty where the workspace has only one.
    """
    run_id = find_run(workspace, prefix)
    recipe = _check_same_run(run_id, replace(stored_recipe(workspace, run_id), workspace=str(workspace)))
    result = _run(_taking_back, recipe, folder=folder)
    if not result["new"]:
        return f"iteration {result['iteration']} of run {run_id} is this training already; nothing was changed"
    return f"{result['told']}\n\nHeld-out success\n{result['table']}\nrun     {run_id}\nreport  {result['report']}"


def compare_recipe(path: Path, overrides: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Compare the arms of a recipe and return the table of their scores as text; `arms` and `seeds`
    replace the recipe's, if not empty.

    Raises `UserError` before anything is started if the comparison cannot be run, and `ArmsFailed`
    at the end if some arms failed.
    """
    recipe = load_comparison(path, overrides, arms, seeds)
    result = _run(_comparison, recipe)
    # Arms that are whole runs share no pool of trajectories, only the held-out episodes.
    arms_are_whole_runs = all(arm.is_whole_run for arm in arms_of(recipe, result["run_id"]))
    view = "v_comparisons" if arms_are_whole_runs else "v_arms"
    return (
        f"\nHeld-out scores, means over seeds with 95% intervals\n{result['table']}\n"
        f"run     {result['run_id']}\nreport  {result['report']}\n"
        f'ask     agentr sql "select * from {view}" -w {shlex.quote(recipe.workspace)}'
    )


def collect_recipe(path: Path, overrides: Sequence[str], *, limit: int | None, enough: int) -> str:
    """Gather experience for the first unfinished iteration of a recipe's run, and return the result
    as text. Raises `UserError` before anything is started if that is not possible.

    Args:
        limit: the most trees, episodes or questions to begin; None means all.
        enough: how many trajectories are enough to train on, for the event that is sent.
    """
    recipe = load_recipe(path, list(overrides))
    again = {"recipe": str(path), "overrides": list(overrides)}
    result = _run(_collection, recipe, trains=False, limit=limit, enough=enough, again=again)
    options = "".join(f" -o {shlex.quote(change)}" for change in overrides)
    return (
        f"\n{result['new']} trajectories more, {result['trajectories']} in all for iteration {result['iteration']}\n"
        f"run     {result['run_id']}\n"
        f"train   agentr improve {shlex.quote(str(path))}{options}"
    )


def improve_recipe(path: Path, overrides: Sequence[str], *, enough: int) -> str:
    """Train on what was gathered for the first unfinished iteration of a recipe's run, and return
    the result as text; with fewer than `enough` trajectories, train nothing.

    Raises `UserError` before anything is started if the training is not possible.
    """
    result = _run(_improvement, load_recipe(path, list(overrides)), enough=enough)
    if not result["trained"]:
        return f"{result['trajectories']} of {enough} trajectories are gathered; nothing is trained"
    return (
        f"\nHeld-out success\n{result['table']}\n"
        f"trained on {result['trajectories']} trajectories\n"
        f"run     {result['run_id']}\nreport  {result['report']}"
    )


def evaluate_recipe(path: Path, overrides: Sequence[str], states: str | None = None) -> str:
    """Evaluate the model of a recipe on the held-out instances; return its score and the run's id
    as text.

    Args:
        states: the beginning of the id of a run in the same workspace, from whose states the
            revision test starts; None: as the recipe says.
    """
    recipe = load_recipe(path, list(overrides))
    if states:
        run_id = find_run(Path(recipe.workspace), states)
        recipe = load_recipe(path, [*overrides, f"evaluation.revision_test.states={json.dumps(run_id)}"])
    return f"{_run(_evaluation, recipe, trains=False)}\nrun     {run_reference(recipe).run_id}"


def measure_headroom(
    path: Path,
    overrides: Sequence[str],
    *,
    episodes: int,
    instances: int,
    judged: int = 0,
    judges: Sequence[Path] = (),
) -> Any:
    """Sample episodes of some training and held-out instances with the model of a recipe; return a
    `stages.headroom.HeadroomReport` on how much could be learned from them.

    Args:
        episodes: how many of each instance.
        instances: how many of each of the two sets; 0 means all.
        judged: how many lost episodes judges are asked about.
        judges: directories of models that judge in addition to the recipe's judge.
    """
    recipe = load_recipe(path, list(overrides))
    numbers = {"episodes": episodes, "instances": instances, "judged": judged}
    return _run(_headroom, recipe, trains=False, **numbers, judges=[str(judge) for judge in judges])


# Prefect builds a form from the parameters of each flow, which takes half a second for a parameter
# of type `Recipe`. These flows are only called in this process, without a form: hence Any.
@flow(name="flywheel", flow_run_name="{recipe.name}", validate_parameters=False)
async def _flywheel(recipe: Any) -> dict[str, Any]:
    return await run_iterations(recipe)


@flow(name="collect-only", flow_run_name="{recipe.name}", validate_parameters=False)
async def _collection(recipe: Any, limit: int | None, enough: int, again: dict[str, Any]) -> dict[str, Any]:
    return await gather_experience(recipe, limit=limit, enough=enough, training_parameters=again)


@flow(name="improve", flow_run_name="{recipe.name}", validate_parameters=False)
async def _improvement(recipe: Any, enough: int) -> dict[str, Any]:
    return await train_on_gathered(recipe, enough=enough)


@flow(name="import", flow_run_name="{recipe.name}", validate_parameters=False)
async def _taking_back(recipe: Any, folder: Path) -> dict[str, Any]:
    return await import_trained_weights(recipe, folder)


@flow(name="compare", flow_run_name="{recipe.name}", validate_parameters=False)
async def _comparison(recipe: Any) -> dict[str, Any]:
    return await run_arms(recipe)


@flow(name="evaluate", validate_parameters=False)
async def _evaluation(recipe: Any) -> str:
    run = run_reference(recipe)
    with runs.run_locked(run):
        await stages.start(run, recipe, evaluates=True)
        async with runs.status_recorded(run, evaluates=True):
            await evaluate_base_model(run, recipe)
    return reporting.score_table(run)


@flow(name="headroom", validate_parameters=False)
async def _headroom(recipe: Any, episodes: int, instances: int, judged: int, judges: list[str]) -> Any:
    run = run_reference(recipe)
    with runs.run_locked(run):
        await stages.start(run, recipe, evaluates=True)
        async with runs.status_recorded(run, evaluates=True):
            return await stages.headroom(run, episodes=episodes, instances=instances, judged=judged, judges=judges)


def _run(function: Any, recipe: Recipe, *, trains: bool = True, **options: Any) -> Any:
    console, library = Console(stderr=True), logging.getLogger("agentr_core")
    progress.console.set(console)
    handler = progress.WarningPrinter(console)
    library.addHandler(handler)
    try:
        return _check_and_run(function, recipe, trains=trains, **options)
    finally:
        library.removeHandler(handler)


def _check_and_run(function: Any, recipe: Recipe, *, trains: bool, **options: Any) -> Any:
    for note in check(recipe, trains=trains):
        progress.print_line(note)
    if recipe.scale.runner == "local":
        server.ensure_server()
    else:
        server.require_server(f"scale.runner {recipe.scale.runner}")
    with server.server_loss_reported():
        return interruption.run(function(recipe, **options))
