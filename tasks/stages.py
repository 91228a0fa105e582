"""The stages of a run as Prefect tasks: each retries what may heal, and returns a small summary.

Tasks never use Prefect's cache: what is done is in the store, and a stage finds it there.
"""

from __future__ import annotations

from typing import Any

from prefect import task

from agentr_core.config import Recipe
from agentr_core.precision import formats
from agentr_core.stages import collect as collecting
from agentr_core.stages import critique as critiquing
from agentr_core.stages import dataset as building
from agentr_core.stages import evaluate as evaluating
from agentr_core.stages import expert
from agentr_core.stages import explore as exploring
from agentr_core.stages import prefer as preferring
from agentr_core.stages import splice as splicing
from agentr_core.stages import start as starting
from agentr_core.stages import train as training
from tasks.options import OPTIONS
from tasks.progress import tell
from tasks.shards import with_workers
from tasks.wiring import RunRef, quiet_workplace, workplace


@task(task_run_name="start", **OPTIONS)
async def start(run: RunRef, recipe: Recipe, *, evaluates: bool = False) -> dict[str, Any]:
    """Write a run and the model it begins with to the store; with `evaluates` it is only evaluated."""
    tell(formats(recipe))
    return await starting.start(quiet_workplace(run, recipe), evaluates=evaluates)


@task(task_run_name="begin-{iteration}", **OPTIONS)
async def begin(run: RunRef, iteration: int) -> None:
    """Write that an iteration runs."""
    await starting.begin(quiet_workplace(run), iteration)


@task(task_run_name="end-{iteration}", **OPTIONS)
async def end(run: RunRef, iteration: int) -> None:
    """Write that an iteration is finished."""
    await starting.end(quiet_workplace(run), iteration)


@task(task_run_name="collect-{iteration}", tags=["gpu", "env"], **OPTIONS)
async def collect(run: RunRef, iteration: int) -> dict[str, Any]:
    """Grow the trees of an iteration, here or on a cluster."""
    async with workplace(run, "collect", iteration) as place:
        return await collecting.collect(with_workers(place), iteration)


@task(task_run_name="critique-{iteration}", tags=["gpu"], **OPTIONS)
async def critique(run: RunRef, iteration: int) -> dict[str, Any]:
    """Pair the paths of the trees and judge the bad ones."""
    async with workplace(run, "critique", iteration) as place:
        return await critiquing.critique(place, iteration)


@task(task_run_name="splice-{iteration}", tags=["env"], **OPTIONS)
async def splice(run: RunRef, iteration: int) -> dict[str, Any]:
    """Make samples of the judged pairs and of the good paths."""
    async with workplace(run, "splice", iteration) as place:
        return await splicing.splice_pairs(place, iteration)


@task(task_run_name="demonstrate-{iteration}", tags=["env"], **OPTIONS)
async def demonstrate(run: RunRef, iteration: int) -> dict[str, Any]:
    """Play the expert on the training instances of an iteration."""
    async with workplace(run, "demonstrate", iteration) as place:
        return await expert.demonstrate(place, iteration)


@task(task_run_name="explore-{iteration}", tags=["gpu", "env"], **OPTIONS)
async def explore(run: RunRef, iteration: int) -> dict[str, Any]:
    """Let the policy play the training instances of an iteration, here or on a cluster."""
    async with workplace(run, "explore", iteration) as place:
        return await exploring.explore(with_workers(place), iteration)


@task(task_run_name="prefer-{iteration}", tags=["env"], **OPTIONS)
async def prefer(run: RunRef, iteration: int) -> dict[str, Any]:
    """Hold the trajectories of an iteration against each other."""
    async with workplace(run, "prefer", iteration) as place:
        return await preferring.prefer(place, iteration)


@task(task_run_name="dataset-{iteration}", **OPTIONS)
async def dataset(run: RunRef, iteration: int) -> dict[str, Any]:
    """Filter, mix and tokenise the samples."""
    async with workplace(run, "dataset", iteration) as place:
        return await building.dataset(place, iteration)


@task(task_run_name="train-{iteration}", tags=["gpu"], **OPTIONS)
async def train(run: RunRef, iteration: int) -> dict[str, Any]:
    """Fine-tune on the dataset."""
    async with workplace(run, "train", iteration) as place:
        return await training.train(place, iteration)


@task(task_run_name="evaluate-{iteration}", tags=["gpu", "env"], **OPTIONS)
async def evaluate(run: RunRef, iteration: int) -> dict[str, Any]:
    """Evaluate the checkpoint of an iteration on the held-out instances."""
    async with workplace(run, "evaluate", iteration) as place:
        return await evaluating.evaluate(with_workers(place), iteration)
