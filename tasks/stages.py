"""The stages of a run as Prefect tasks: each retries what may heal, and returns a small summary.

Tasks never use Prefect's cache: what is done is in the store, and a stage finds it there.
"""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from agentr_core.config import Recipe
from agentr_core.errors import Transient
from agentr_core.stages import collect as collecting
from agentr_core.stages import critique as critiquing
from agentr_core.stages import dataset as building
from agentr_core.stages import evaluate as evaluating
from agentr_core.stages import splice as splicing
from agentr_core.stages import start as starting
from agentr_core.stages import train as training
from tasks.progress import tell
from tasks.wiring import RunRef, quiet_workplace, workplace


async def heals(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Return whether a failed task run failed by an error that may heal by itself; a local run says so."""
    failure = await state.aresult(raise_on_failure=False)
    transient = isinstance(failure, Transient)
    if transient:
        tell(f"{run.name} is tried again: {failure}")
    return transient


_OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": heals,
}


@task(task_run_name="start", **_OPTIONS)
async def start(run: RunRef, recipe: Recipe) -> dict[str, Any]:
    """Write a run and the model it begins with to the store."""
    return await starting.start(quiet_workplace(run, recipe))


@task(task_run_name="begin-{iteration}", **_OPTIONS)
async def begin(run: RunRef, iteration: int) -> None:
    """Write that an iteration runs."""
    await starting.begin(quiet_workplace(run), iteration)


@task(task_run_name="end-{iteration}", **_OPTIONS)
async def end(run: RunRef, iteration: int) -> None:
    """Write that an iteration is finished."""
    await starting.end(quiet_workplace(run), iteration)


@task(task_run_name="collect-{iteration}-{shard}", tags=["gpu", "env"], **_OPTIONS)
async def collect(run: RunRef, iteration: int, shard: int = 0, shards: int = 1) -> dict[str, Any]:
    """Grow the trees of an iteration, or of one shard of it."""
    async with workplace(run, "collect", iteration) as place:
        return await collecting.collect(place, iteration, shard=shard, shards=shards)


@task(task_run_name="critique-{iteration}", tags=["gpu"], **_OPTIONS)
async def critique(run: RunRef, iteration: int) -> dict[str, Any]:
    """Pair the paths of the trees and judge the bad ones."""
    async with workplace(run, "critique", iteration) as place:
        return await critiquing.critique(place, iteration)


@task(task_run_name="splice-{iteration}", tags=["env"], **_OPTIONS)
async def splice(run: RunRef, iteration: int) -> dict[str, Any]:
    """Make samples of the judged pairs and of the good paths."""
    async with workplace(run, "splice", iteration) as place:
        return await splicing.splice_pairs(place, iteration)


@task(task_run_name="dataset-{iteration}", **_OPTIONS)
async def dataset(run: RunRef, iteration: int) -> dict[str, Any]:
    """Filter, mix and tokenise the samples."""
    async with workplace(run, "dataset", iteration) as place:
        return await building.dataset(place, iteration)


@task(task_run_name="train-{iteration}", tags=["gpu"], **_OPTIONS)
async def train(run: RunRef, iteration: int) -> dict[str, Any]:
    """Fine-tune on the dataset."""
    async with workplace(run, "train", iteration) as place:
        return await training.train(place, iteration)


@task(task_run_name="evaluate-{iteration}", tags=["gpu", "env"], **_OPTIONS)
async def evaluate(run: RunRef, iteration: int) -> dict[str, Any]:
    """Evaluate the checkpoint of an iteration on the held-out instances."""
    async with workplace(run, "evaluate", iteration) as place:
        return await evaluating.evaluate(place, iteration)
