"""Make the tiny base model, as one Prefect task."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from agentr_core.config import Recipe
from tasks.progress import stage_progress


@task(task_run_name="pretrain", cache_policy=NO_CACHE, persist_result=False, tags=["gpu"])
async def pretrain(recipe: Recipe) -> str:
    """Return the directory of a recipe's base model, trained and published; an interrupted training is gone on with."""
    from agentr_core.base_model.publish import make_and_publish

    work = Path(recipe.workspace) / "base"
    async with stage_progress("pretrain", 0) as update:
        return str(await asyncio.to_thread(make_and_publish, recipe.base, seed=recipe.seed, work=work, progress=update))
