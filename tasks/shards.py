"""Run shards of collection and evaluation as Prefect tasks on a cluster: workers return rows of the
store, and the stage, in the run's own process, writes them.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from prefect import task
from prefect.futures import PrefectFuture

from agentr_core.errors import ConfigError, WorkerLost
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import Shard, ShardResult, shard_result
from tasks import runners
from tasks.options import OPTIONS
from tasks.progress import print_line
from tasks.wiring import equipment

T = TypeVar("T")

CHECK_INTERVAL_SECONDS = 60.0
"""Seconds without a finished shard after which the cluster is checked for workers."""
MAX_SECONDS_WITHOUT_WORKERS = 600.0
"""Seconds that a cluster may go without a worker; by itself, Dask waits for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """All that a worker needs to work through one shard."""

    recipe: Recipe
    run_id: str
    shard: Shard
    at: datetime | None
    """When the run started."""


def with_workers(ctx: RunContext) -> RunContext:
    """Return a context that hands its shards to the cluster of its recipe, if the recipe names
    one.
    """
    if ctx.recipe.scale.runner == "local":
        return ctx
    return replace(ctx, distribute=partial(run_on_cluster, ctx.recipe, ctx.run_id, at=ctx.started_at()))


# By task runners, not work pools: a pool would make a flow run of each shard, send its rows through
# result storage, and not notice a killed worker by itself.
@task(task_run_name="{name}", **OPTIONS)
async def work(name: str, order: bytes) -> ShardResult:
    """Work through a pickled `ShardJob`. The task has no tags: its stage already holds their slots,
    and the task would wait for its own stage.
    """
    job: ShardJob = pickle.loads(order)
    return await shard_result(job.shard, equipment(job.recipe, job.run_id, job.at))


async def run_on_cluster(
    recipe: Recipe, run_id: str, shards: Sequence[Shard], *, at: datetime | None = None
) -> AsyncGenerator[ShardResult, None]:
    """Yield the batch that a worker of the recipe's cluster returns for each shard, in the order in
    which they finish.

    `at` is when the run started, for chat templates that print the date.

    Raises:
        ConfigError: the cluster does not answer, or has no workers, or its extra is not installed.
        WorkerLost: several workers died one after the other at the same shard, or the whole cluster
            was lost.
        Transient: a worker's error did not go away within the retries of its task.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[PrefectFuture[ShardResult]] = asyncio.Queue()

    def finish(future: PrefectFuture[ShardResult]) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, future)

    with runners.running_cluster(recipe.scale) as cluster:
        # The cluster drops work whose future is no longer referenced.
        pending: set[PrefectFuture[Any]] = set()
        for number, shard in enumerate(shards, start=1):
            # As bytes: Prefect looks for futures in every field of a parameter.
            order = pickle.dumps(ShardJob(recipe=recipe, run_id=run_id, shard=shard, at=at))
            name = f"{type(shard).__name__}-{number}-of-{len(shards)}"
            pending.add(future := cluster.runner.submit(work, {"name": name, "order": order}))
            future.add_done_callback(finish)
        while pending:
            future = await _next(queue, cluster, recipe.scale.address)
            try:
                batch = await asyncio.to_thread(future.result)
            except cluster.worker_lost_errors as error:
                raise WorkerLost(
                    f"workers were lost again and again at the same shard ({error}); look at the workers' logs, "
                    "give them more memory, or make scale.shard_size smaller"
                ) from error
            except cluster.cluster_lost_errors as error:
                address = recipe.scale.address or "this machine"
                raise WorkerLost(
                    f"the cluster at {address} was lost with all its shards; see that its scheduler runs, and the same "
                    "command goes on where it stopped"
                ) from error
            pending.remove(future)
            yield batch


async def _next(queue: asyncio.Queue[T], cluster: runners.Cluster, address: str) -> T:
    """Return the next item of the queue. Print a line when the cluster has no worker, and raise
    `ConfigError` once that has lasted `MAX_SECONDS_WITHOUT_WORKERS` seconds.
    """
    label, remedy = "the cluster on this machine", "begin the run again"
    if address:
        label, remedy = f"the cluster at {address}", f"start workers there, as in `dask worker {address} --nthreads 1`"
    empty_since: float | None = None
    while True:
        # Not `wait_for`, which may lose an item that arrives just as it times out.
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_INTERVAL_SECONDS):
                return await queue.get()
        if not await asyncio.to_thread(cluster.has_no_worker):
            empty_since = None
        elif empty_since is None:
            empty_since = time.monotonic()
            print_line(f"{label} has no worker; {remedy}")
        elif time.monotonic() - empty_since >= MAX_SECONDS_WITHOUT_WORKERS:
            raise ConfigError(f"{label} has had no worker for {MAX_SECONDS_WITHOUT_WORKERS:g} s; {remedy}")
