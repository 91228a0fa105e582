"""The options of all Prefect tasks: they retry transient errors, and never use Prefect's cache."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from agentr_core.errors import Transient
from tasks.progress import print_line


async def is_transient_failure(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Return whether a task run failed with a transient error; if so, also print that it is tried
    again.
    """
    failure = await state.aresult(raise_on_failure=False)
    transient = isinstance(failure, Transient)
    if transient:
        print_line(f"{run.name} is tried again: {failure}")
    return transient


OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient_failure,
}
