"""Make the tiny base model, as one Prefect task."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from agentr_core.recipes.recipe import Recipe
from tasks.progress import stage_progress


@task(task_run_name="pretrain", cache_policy=NO_CACHE, persist_result=False, tags=["gpu"])
async def pretrain(recipe: Recipe) -> str:
    """Return the directory of a recipe's base model, trained and published. An interrupted training
    is continued.
    """
    from agentr_core.base_model.job import BaseJob
    from agentr_core.base_model.make import make

    job = BaseJob(config=recipe.base, seed=recipe.seed, folder=Path(recipe.workspace) / "base")
    async with stage_progress("pretrain", 0) as update:
        return str(
            await make(
                job, on_progress=lambda step: update(step.step, step.total_steps, f"steps, loss {step.loss:.3f}")
            )
        )
