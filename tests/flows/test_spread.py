"""How shards travel to the workers of a cluster on this machine, and what comes back when workers
die or work fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from echo import Echo
from prefect import flow
from servers import free_port
from wheel import launched

from agentr_core.errors import ConfigError, EnvironmentFault, WorkerLost
from agentr_core.methods.faults import parse
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.equipment import ShardResult
from tasks import runners
from tasks import shards as work
from tasks.shards import run_on_cluster

SUPPORT = Path(__file__).parents[1] / "support"
CLUSTERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(find_spec(f"prefect_{name}") is None, reason=f"the extra {name} is missing"),
    )
    for name in ("dask", "ray")
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]


@pytest.fixture(params=CLUSTERS)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe that starts a cluster of two processes, which find the shards of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    return parse({"name": "r", "model": {"path": "m"}, "scale": {"runner": request.param, "workers": 2}})


@flow(validate_parameters=False)
async def gather(recipe: Recipe, shards: Sequence[Any]) -> list[ShardResult]:
    return [batch async for batch in run_on_cluster(recipe, "run", shards)]


def tries(folder: Path) -> dict[str, int]:
    """Return the process of each try of a shard."""
    return {file.name: int(file.read_text()) for file in sorted(folder.iterdir())}


def texts(batches: Sequence[ShardResult]) -> list[str]:
    return sorted(row["trajectory_id"] for batch in batches for row in batch.rows.get("rl_validation", ()))


def test_shards_are_done_elsewhere_and_what_may_heal_is_tried_again(recipe: Recipe, tmp_path: Path) -> None:
    shards = [
        *Echo(texts=("a", "b", "c"), folder=tmp_path).split(1),
        Echo(texts=("d",), folder=tmp_path, fault="passing"),
        Echo(texts=("e",), folder=tmp_path, fault="lasting"),
    ]

    batches = asyncio.run(gather(recipe, shards))

    assert texts(batches) == ["run a", "run b", "run c", "run d"]
    assert [batch.effort.tokens for batch in batches if batch.fault is None] == [1, 1, 1, 1]
    assert list(tries(tmp_path)) == ["a-1", "b-1", "c-1", "d-1", "d-2", "e-1"]
    assert os.getpid() not in tries(tmp_path).values()
    (fault,) = (batch.fault for batch in batches if batch.fault is not None)
    assert isinstance(fault, EnvironmentFault)
    assert str(fault) == "broken"


@pytest.mark.long
def test_a_shard_whose_worker_dies_is_done_by_another(recipe: Recipe, tmp_path: Path) -> None:
    batches = asyncio.run(gather(recipe, Echo(texts=("a", "b"), folder=tmp_path, deadly=1).split(1)))

    assert texts(batches) == ["run a", "run b"]
    attempts = tries(tmp_path)
    assert list(attempts) == ["a-1", "a-2", "b-1", "b-2"]
    assert attempts["a-1"] != attempts["a-2"]


@pytest.mark.long
def test_a_shard_that_kills_every_worker_is_given_up(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"^workers were lost again and again at the same shard \("):
        asyncio.run(gather(recipe, [Echo(texts=("a",), folder=tmp_path, deadly=99)]))

    assert len(tries(tmp_path)) == 4


def cluster_of_its_own() -> tuple[str, Recipe, list[str]]:
    """Return the address of a Dask cluster, a recipe for it, and the command of its scheduler."""
    address = f"tcp://127.0.0.1:{free_port()}"
    recipe = parse({"name": "r", "model": {"path": "m"}, "scale": {"runner": "dask", "address": address}})
    return address, recipe, [sys.executable, "-m", "dask", "scheduler", "--host", address, "--no-dashboard"]


def test_a_cluster_without_workers_is_told_and_given_up(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_env: dict[str, str]
) -> None:
    if recipe.scale.runner != "dask":
        pytest.skip("Ray starts its workers itself")
    monkeypatch.setattr(work, "CHECK_INTERVAL_SECONDS", 0.5)
    monkeypatch.setattr(work, "MAX_SECONDS_WITHOUT_WORKERS", 1.0)
    lines: list[str] = []
    monkeypatch.setattr(work, "print_line", lines.append)
    address, lonely, scheduler = cluster_of_its_own()

    with (
        launched(scheduler, env=process_env),
        pytest.raises(ConfigError, match=f"^the cluster at {address} has had no worker for 1 s; start workers there"),
    ):
        asyncio.run(gather(lonely, Echo(texts=("a", "b"), folder=tmp_path).split(1)))
    assert lines == [
        f"the cluster at {address} has no worker; start workers there, as in `dask worker {address} --nthreads 1`"
    ]


@pytest.mark.long
def test_a_cluster_that_is_lost_is_told_and_may_heal(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_env: dict[str, str]
) -> None:
    if recipe.scale.runner != "dask":
        pytest.skip("Ray's scheduler ends with its last process")
    monkeypatch.setattr(work, "CHECK_INTERVAL_SECONDS", 0.5)
    address, far, scheduler = cluster_of_its_own()

    with launched(scheduler, env=process_env) as process:
        # That no worker is there is told once the shards are.
        monkeypatch.setattr(work, "print_line", lambda line: process.kill())
        with pytest.raises(WorkerLost, match=f"^the cluster at {address} was lost with all its shards; see that"):
            asyncio.run(gather(far, Echo(texts=("a", "b"), folder=tmp_path).split(1)))


def test_a_cluster_that_does_not_answer(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    if recipe.scale.runner != "dask":
        pytest.skip("Ray waits for minutes")
    import dask

    missing = parse({"name": "r", "model": {"path": "m"}, "scale": {"runner": "dask", "address": "tcp://127.0.0.1:9"}})
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(ConfigError, match=r"^no dask cluster answers at tcp://127.0.0.1:9 \(.*\); start it, or change"),
        runners.running_cluster(missing.scale),
    ):
        pass
