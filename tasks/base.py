"""Make the tiny base model, as one Prefect task."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from prefect import task
from prefect.cache_policies import NO_CACHE

from agentr_core.models.cpu_memory import keep_freed_memory
from agentr_core.recipes import Recipe
from tasks.progress import stage_progress

__all__ = ["keep_freed_memory", "pretrain"]


@task(task_run_name="pretrain", cache_policy=NO_CACHE, persist_result=False, tags=["gpu"])
async def pretrain(recipe: Recipe) -> str:
    """Return the directory of a recipe's base model, trained and published. An interrupted training
    is continued.
    """
    from agentr_core.base_model.publish import make_and_publish

    keep_freed_memory()
    cancelled = Event()
    work = Path(recipe.workspace) / "base"
    # A thread of its own: one that began before the allocator was set would keep the arena it has.
    with ThreadPoolExecutor(1) as thread:
        async with stage_progress("pretrain", 0) as update:
            make = partial(
                make_and_publish, recipe.base, seed=recipe.seed, work=work, progress=update, cancelled=cancelled
            )
            try:
                return str(
                    await asyncio.get_running_loop().run_in_executor(thread, contextvars.copy_context().run, make)
                )
            except asyncio.CancelledError:
                cancelled.set()
                raise
