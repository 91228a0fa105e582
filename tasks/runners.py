"""The clusters that Prefect's task runners reach: Dask and Ray, each an extra of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agentr_core.errors import ConfigError
from agentr_core.recipes.recipe import ScaleConfig

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

_MODULES = {"dask": "prefect_dask", "ray": "prefect_ray"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A task runner and what differs between clusters.

    `connect` connects to the cluster once the runner is entered. A future raises one of
    `worker_lost_errors` if its workers died more often than the cluster tolerates, and one of
    `cluster_lost_errors` if the cluster itself was lost. `has_no_worker` blocks and returns whether
    the cluster has no worker at all.
    """

    runner: TaskRunner[Any]
    connect: Callable[[], object]
    worker_lost_errors: tuple[type[Exception], ...]
    has_no_worker: Callable[[], bool] = lambda: False
    cluster_lost_errors: tuple[type[Exception], ...] = ()


def check(scale: ScaleConfig) -> None:
    """Raise `ConfigError` if a recipe's task runner needs an extra of the package that is not
    installed.
    """
    module = _MODULES.get(scale.runner)
    if module is not None and find_spec(module) is None:
        raise ConfigError(
            f"scale.runner is {scale.runner}, and {module.replace('_', '-')} is not installed; "
            f"`pip install -c constraints.txt -e '.[{scale.runner}]'` in the checkout installs it"
        )


@contextmanager
def running_cluster(scale: ScaleConfig) -> Iterator[Cluster]:
    """Yield the cluster of a recipe for the block: the one at its address, or one started here.

    Blocks until it answers. Raises `ConfigError` if it does not, or if its extra is not installed.
    """
    check(scale)
    with ExitStack() as stack:
        cluster = _dask(scale) if scale.runner == "dask" else _ray(scale)
        if scale.runner == "dask":
            # Only now, since the import of distributed in `_dask` writes its defaults into the same
            # configuration.
            stack.enter_context(_longer_worker_timeout())
        try:
            stack.enter_context(cluster.runner)
            cluster.connect()
        except OSError as error:
            raise ConfigError(
                f"no {scale.runner} cluster answers at {scale.address or 'this machine'} ({_line(error)}); start it, "
                "or change scale.address"
            ) from error
        yield cluster


def _line(error: OSError) -> str:
    return " ".join(str(error).split())


def _longer_worker_timeout() -> AbstractContextManager[object]:
    """Return a context in which Dask waits longer than 15 s for a lost worker: our own clusters
    restart one, which takes longer on a busy machine.
    """
    import dask

    timeout_context: AbstractContextManager[object] = dask.config.set(
        {"distributed.deploy.lost-worker-timeout": "5 minutes"}
    )
    return timeout_context


def _dask(scale: ScaleConfig) -> Cluster:
    from distributed import CancelledError, KilledWorker
    from prefect_dask.task_runners import DaskTaskRunner

    # One shard at a time keeps a worker busy: its batches are full, and it holds one model.
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0"}
    if scale.workers:
        options["n_workers"] = scale.workers
    runner = DaskTaskRunner(address=scale.address) if scale.address else DaskTaskRunner(cluster_kwargs=options)
    return Cluster(
        runner,
        lambda: runner.client,
        (KilledWorker,),
        has_no_worker=lambda: not runner.client.scheduler_info()["workers"],
        cluster_lost_errors=(CancelledError,),
    )


def _ray(scale: ScaleConfig) -> Cluster:
    # Ray first: the lazy import of prefect_ray would load its exceptions a second time, and none
    # would be caught.
    from ray.exceptions import LocalRayletDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError

    # isort: split
    from prefect_ray.task_runners import RayTaskRunner

    options: dict[str, Any] = {"include_dashboard": False}
    if scale.workers:
        options["num_cpus"] = scale.workers
    runner = RayTaskRunner(address=scale.address) if scale.address else RayTaskRunner(init_kwargs=options)
    return Cluster(runner, lambda: None, (WorkerCrashedError, NodeDiedError, LocalRayletDiedError, OutOfMemoryError))
