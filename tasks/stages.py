"""The stages of a run as Prefect tasks: each retries transient errors, and returns a small summary.

Tasks never use Prefect's cache: results are in the store, where a stage finds those it has already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from prefect import Task, task

from agentr_core.errors import ConfigError
from agentr_core.methods.table import importable, plan_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime import start as starting
from agentr_core.runtime.alarms import check_stage
from agentr_core.runtime.instances import closed_stages, has_begun
from agentr_core.runtime.live import progress_file
from agentr_core.runtime.machine import formats
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.remaining import remaining
from agentr_core.runtime.start import check_run
from agentr_core.stages import headroom as sampled
from agentr_core.stages.headroom import HeadroomReport
from agentr_core.store.codec.ledger import alarms_of
from agentr_core.store.database import snapshot
from agentr_core.store.tables import Alarm
from tasks import events
from tasks.options import OPTIONS
from tasks.progress import stage_progress, tell
from tasks.shards import with_workers
from tasks.wiring import RunRef, quiet_workplace
from tasks.workspaces import stored_recipe


@task(task_run_name="start", **OPTIONS)
async def start(run: RunRef, recipe: Recipe, *, evaluates: bool = False, collects: bool = False) -> dict[str, Any]:
    """Write a run and the model it begins with to the store; with `evaluates` the run only
    evaluates, with `collects` it only gathers experience.
    """
    if message := formats(recipe, trains=not evaluates):
        tell(message)
    return await starting.start(quiet_workplace(run, recipe), evaluates=evaluates, collects=collects)


@task(task_run_name="begin-{iteration}", **OPTIONS)
async def begin(run: RunRef, iteration: int) -> None:
    """Record that an iteration is running."""
    await starting.begin(quiet_workplace(run), iteration)


@task(task_run_name="end-{iteration}", **OPTIONS)
async def end(run: RunRef, iteration: int) -> None:
    """Record that an iteration is finished, and tell Prefect."""
    place = quiet_workplace(run)
    with events.tell_changes(place, iteration, events.published_by(place, iteration)):
        await starting.end(place, iteration)


@task(task_run_name="headroom", tags=("gpu", "env"), **OPTIONS)
async def headroom(run: RunRef, *, episodes: int, instances: int, judged: int, judges: Sequence[str]) -> HeadroomReport:
    """Sample episodes of training and held-out instances and return what there is to learn."""
    async with _workplace(run, "headroom", 0) as place:
        judge_paths = [Path(judge) for judge in judges]
        return await sampled.headroom(
            with_workers(place), importable(), episodes=episodes, instances=instances, judged=judged, judges=judge_paths
        )


async def perform(run: RunRef, iteration: int, name: str, *, limit: int | None = None) -> Any:
    """Run a stage of an iteration as a Prefect task and return its summary; the iteration's first
    stage also records that the iteration has begun.

    Do nothing and return None if the stage's results could not be used any more: the dataset or
    checkpoint made from them exists already, or an arm of a comparison was trained on this pool.

    Args:
        limit: the most trees, episodes or questions that a gathering stage begins; None: all.

    Raises:
        ConfigError: the iteration has no such stage, its first stage was not run yet, or a file
            that the run reads has changed.
        DataFault: the iteration before has no checkpoint.
        StoreError: a checkpoint that the stage builds on, or the rows that it was trained on, are
            not those in the store.
    """
    recipe = stored_recipe(Path(run.workspace), run.run_id, patient=True)
    plan = plan_of(recipe, iteration)
    stage = plan.stage(name)
    place = quiet_workplace(run, recipe)
    starting.check_files(place, stage)
    if iteration > 1:
        place.trained(iteration - 1)
    # With `best`, the weights may be those of any earlier iteration, so all are checked.
    check_run(place, *((iteration - 1, iteration) if recipe.promote == "last" else ()))
    if iteration and stage is plan.stages[0]:
        await begin(run, iteration)
    with snapshot(place.store) as state:
        now = replace(place, store=state)
        if not has_begun(now, iteration):
            raise ConfigError(
                f"iteration {iteration} has not begun; run its first stage, {plan.stages[0].name}, before"
            )
        over, before = stage in closed_stages(now, iteration), events.published_by(now, iteration)
    if over:
        tell(f"what is trained on the data of iteration {iteration} is made; {name} adds nothing to it")
        return None
    with events.tell_changes(place, iteration, before):
        return await _task(name, stage.needs)(run, iteration, limit)


@asynccontextmanager
async def _workplace(run: RunRef, stage: str, iteration: int) -> AsyncIterator[Workplace]:
    """Yield the workplace of a stage. Its progress is shown, and each new alarm is printed and sent
    to Prefect as an event.
    """
    quiet = quiet_workplace(run)
    alarm_ids = {alarm.id for alarm in alarms_of(quiet.store, quiet.iteration_id(iteration))}

    def alarmed(alarm: Alarm) -> None:
        if alarm.id in alarm_ids:
            return
        alarm_ids.add(alarm.id)
        location = f" in step {alarm.step}" if alarm.step else ""
        tell(f"alarm {alarm.name}, {stage} of iteration {iteration}{location}: {alarm.message}")
        events.raised(quiet, iteration, alarm)

    file = progress_file(Path(run.workspace), run.run_id)
    async with stage_progress(stage, iteration, remaining(quiet, stage, iteration), file=file) as update:
        yield replace(quiet, progress=update, alarmed=alarmed)


@cache
def _task(name: str, needs: tuple[str, ...]) -> Task[[RunRef, int, int | None], Any]:
    """Return the Prefect task that runs a stage; it looks the stage up by name when it runs.

    `needs` are the task's tags, for Prefect's concurrency limits.
    """

    async def work(run: RunRef, iteration: int, limit: int | None) -> Any:
        async with _workplace(run, name, iteration) as base:
            place = replace(base, limit=limit)
            stage = place.plan(iteration).stage(name)
            summary = await stage.work(with_workers(place) if stage.spreads else place, iteration)
            check_stage(place, iteration, stage)
        if isinstance(summary, dict) and (note := summary.get("note")):
            tell(f"{name} of iteration {iteration}: {note}")
        return summary

    return task(name=name, task_run_name=f"{name}-{{iteration}}", tags=needs, **OPTIONS)(work)
