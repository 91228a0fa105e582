"""Collection and evaluation over the workers of a real cluster, undisturbed and with a worker
killed at work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil
import pytest
from prefect import flow
from readme import command
from servers import free_port
from wheel import PATIENCE, kill_group, launched, write_recipe

from agentr_core.recipes.recipe import Recipe
from agentr_core.store.database import Store
from flows import stages
from tasks import stages as steps
from tasks.wiring import load_recipe, run_reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    # Dask tells by warnings that a worker it talked to is gone.
    pytest.mark.filterwarnings("ignore:.*Sending large graph:UserWarning"),
]
CONTENT = (
    "select * exclude (created_at, writer) from tree order by all",
    "select * exclude (created_at) from node order by all",
    "select * from generation order by all",
    "select * exclude (created_at, environment_seconds, sampling_seconds) from episode order by all",
    "select * from step order by all",
)


@dataclass(frozen=True)
class Cluster:
    """A cluster of two workers: how a recipe names it, and how one of the workers that are busy is
    killed.
    """

    overrides: tuple[str, ...]
    kill_one: Callable[[], None]


@contextmanager
def dask(env: dict[str, str]) -> Iterator[Cluster]:
    """A scheduler and two workers, each a process of its own, as they would be on three
    machines.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    scheduler = [*DASK, *command("dask scheduler").split()[1:], "--host", address, "--no-dashboard"]
    worker = [*DASK, *command(WORKER).replace("tcp://127.0.0.1:8786", address).split()[2:], "--no-dashboard"]
    with ExitStack() as stack:
        stack.enter_context(launched(scheduler, env=env))
        workers = [stack.enter_context(launched(worker, env=env)) for _ in range(2)]
        yield Cluster(("scale.runner=dask", f"scale.address={address}"), lambda: kill_group(workers[0]))


@contextmanager
def ray(env: dict[str, str]) -> Iterator[Cluster]:
    """A Ray of two processes, made by the task runner for each stage."""

    def kill_one() -> None:
        # The title of a worker at work; Ray's own agents, whose titles begin alike, take the whole
        # node with them.
        busy = (p for p in psutil.Process().children(recursive=True) if " ".join(p.cmdline()).startswith("ray::work"))
        os.kill(next(busy).pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "DOOR_PAUSE"):
            patch.setenv(name, env[name])
        yield Cluster(("scale.runner=ray", "scale.workers=2"), kill_one)


WORKER = "CUDA_VISIBLE_DEVICES=0 dask worker"
DASK = [sys.executable, "-m", "dask"]
MAKERS = {"dask": dask, "ray": ray}


@pytest.fixture(scope="module", params=list(MAKERS))
def cluster(request: pytest.FixtureRequest, process_env: dict[str, str]) -> Iterator[Cluster]:
    """A cluster for both tests; the one that kills a worker comes last."""
    name: str = request.param
    if find_spec(f"prefect_{name}") is None:
        pytest.skip(f"the extra {name} is not installed")
    path = os.pathsep.join([process_env["PYTHONPATH"], *filter(None, sys.path)])
    with MAKERS[name](process_env | {"PYTHONPATH": path, "DOOR_PAUSE": "0.1"}) as new_cluster:
        yield new_cluster


@flow(validate_parameters=False)
async def begin(recipe: Recipe) -> None:
    """The first model's evaluation and the first collection of a run."""
    run = run_reference(recipe)
    await steps.start(run, recipe)
    await stages.evaluate(run.run_id, 0, run.workspace)
    await stages.collect(run.run_id, 1, run.workspace)


def content(store: Store) -> list[pd.DataFrame]:
    return [store.query(sql) for sql in CONTENT]


def finished_trees(store: Store) -> int:
    return int(store.query("select count(*) as n from tree where finished")["n"][0])


def same(one: list[pd.DataFrame], other: list[pd.DataFrame]) -> bool:
    return all(left.equals(right) and len(left) for left, right in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone(
    prefect_server: None, door_installed: None, door_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[pd.DataFrame]:
    """What a run in this process leaves in the store."""
    recipe = load_recipe(write_recipe(tmp_path_factory.mktemp("alone"), door_model), [])
    asyncio.run(begin(recipe))
    return content(Store(Path(recipe.workspace) / "store.duckdb"))


@pytest.mark.long
def test_a_cluster_makes_what_one_process_makes(
    cluster: Cluster, alone: list[pd.DataFrame], tmp_path: Path, door_model: Path
) -> None:
    recipe = load_recipe(write_recipe(tmp_path, door_model), ["scale.shard_size=3", *cluster.overrides])

    asyncio.run(begin(recipe))

    store = Store(tmp_path / "runs" / "store.duckdb")
    assert same(content(store), alone)
    assert store.query("select * from event").empty


@pytest.mark.long
def test_a_worker_killed_at_work_changes_nothing(
    cluster: Cluster, alone: list[pd.DataFrame], tmp_path: Path, door_model: Path
) -> None:
    recipe = load_recipe(write_recipe(tmp_path, door_model), ["scale.shard_size=1", *cluster.overrides])
    store = Store(tmp_path / "runs" / "store.duckdb")
    killed_at: list[int] = []

    def kill() -> None:
        """With shards left for both workers, and each one of a second or more, both are at work."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if store.path.exists() and (done := finished_trees(store)):
                killed_at.append(done)
                cluster.kill_one()
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    asyncio.run(begin(recipe))
    killer.join()

    assert killed_at
    assert killed_at[0] < 4
    assert same(content(store), alone)
    assert store.query("select * from event").empty
