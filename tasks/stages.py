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
from agentr_core.methods.table import importable_methods, plan_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime import start as starting
from agentr_core.runtime.alarms import check_stage
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.instances import closed_stages, has_begun
from agentr_core.runtime.live import progress_file
from agentr_core.runtime.machine import number_formats
from agentr_core.runtime.remaining import estimate_remaining
from agentr_core.runtime.start import check_run_weights
from agentr_core.stages import headroom as sampled
from agentr_core.stages.headroom import HeadroomReport
from agentr_core.store.codec.ledger import load_alarms
from agentr_core.store.database import snapshot
from agentr_core.store.tables import Alarm
from tasks import events
from tasks.options import OPTIONS
from tasks.progress import print_line, stage_progress
from tasks.shards import with_workers
from tasks.wiring import RunRef, quiet_context
from tasks.workspaces import stored_recipe


@task(task_run_name="start", **OPTIONS)
async def start(run: RunRef, recipe: Recipe, *, evaluates: bool = False, collects: bool = False) -> dict[str, Any]:
    """Write a run and the model it begins with to the store; with `evaluates` the run only
    evaluates, with `collects` it only gathers experience.
    """
    if message := number_formats(recipe, with_training=not evaluates):
        print_line(message)
    return await starting.start_run(quiet_context(run, recipe), evaluates=evaluates, collects=collects)


@task(task_run_name="begin-{iteration}", **OPTIONS)
async def begin(run: RunRef, iteration: int) -> None:
    """Record that an iteration is running."""
    await starting.begin_iteration(quiet_context(run), iteration)


@task(task_run_name="end-{iteration}", **OPTIONS)
async def end(run: RunRef, iteration: int) -> None:
    """Record that an iteration is finished, and tell Prefect."""
    ctx = quiet_context(run)
    with events.send_product_events(ctx, iteration, events.products_of_iteration(ctx, iteration)):
        await starting.end_iteration(ctx, iteration)


@task(task_run_name="headroom", tags=("gpu", "env"), **OPTIONS)
async def headroom(run: RunRef, *, episodes: int, instances: int, judged: int, judges: Sequence[str]) -> HeadroomReport:
    """Sample episodes of training and held-out instances and return what there is to learn."""
    async with _stage_context(run, "headroom", 0) as ctx:
        judge_paths = [Path(judge) for judge in judges]
        return await sampled.headroom(
            with_workers(ctx),
            importable_methods(),
            episodes=episodes,
            instances=instances,
            max_judged=judged,
            judges=judge_paths,
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
    ctx = quiet_context(run, recipe)
    starting.check_files(ctx, stage)
    if iteration > 1:
        ctx.trained_checkpoint(iteration - 1)
    # With `best`, the weights may be those of any earlier iteration, so all are checked.
    check_run_weights(ctx, *((iteration - 1, iteration) if recipe.promote == "last" else ()))
    if iteration and stage is plan.stages[0]:
        await begin(run, iteration)
    with snapshot(ctx.store) as state:
        snapshot_ctx = replace(ctx, store=state)
        if not has_begun(snapshot_ctx, iteration):
            raise ConfigError(
                f"iteration {iteration} has not begun; run its first stage, {plan.stages[0].name}, before"
            )
        is_closed, products_before = (
            stage in closed_stages(snapshot_ctx, iteration),
            events.products_of_iteration(snapshot_ctx, iteration),
        )
    if is_closed:
        print_line(f"what is trained on the data of iteration {iteration} is made; {name} adds nothing to it")
        return None
    with events.send_product_events(ctx, iteration, products_before):
        return await _task(name, stage.needs)(run, iteration, limit)


@asynccontextmanager
async def _stage_context(run: RunRef, stage: str, iteration: int) -> AsyncIterator[RunContext]:
    """Yield the context of a stage. Its progress is shown, and each new alarm is printed and sent
    to Prefect as an event.
    """
    quiet_ctx = quiet_context(run)
    alarm_ids = {alarm.id for alarm in load_alarms(quiet_ctx.store, quiet_ctx.iteration_id(iteration))}

    def on_alarm(alarm: Alarm) -> None:
        if alarm.id in alarm_ids:
            return
        alarm_ids.add(alarm.id)
        location = f" in step {alarm.step}" if alarm.step else ""
        print_line(f"alarm {alarm.name}, {stage} of iteration {iteration}{location}: {alarm.message}")
        events.send_alarm(quiet_ctx, iteration, alarm)

    file = progress_file(Path(run.workspace), run.run_id)
    async with stage_progress(stage, iteration, estimate_remaining(quiet_ctx, stage, iteration), file=file) as update:
        yield replace(quiet_ctx, progress=update, on_alarm=on_alarm)


@cache
def _task(name: str, needs: tuple[str, ...]) -> Task[[RunRef, int, int | None], Any]:
    """Return the Prefect task that runs a stage; it looks the stage up by name when it runs.

    `needs` are the task's tags, for Prefect's concurrency limits.
    """

    async def work(run: RunRef, iteration: int, limit: int | None) -> Any:
        async with _stage_context(run, name, iteration) as base_ctx:
            ctx = replace(base_ctx, limit=limit)
            stage = ctx.plan(iteration).stage(name)
            summary = await stage.work(with_workers(ctx) if stage.spreads else ctx, iteration)
            check_stage(ctx, iteration, stage)
        if isinstance(summary, dict) and (note := summary.get("note")):
            print_line(f"{name} of iteration {iteration}: {note}")
        return summary

    return task(name=name, task_run_name=f"{name}-{{iteration}}", tags=needs, **OPTIONS)(work)
