"""`deployments/prefect.yaml` on a work pool: workers at the queue `cpu`, and what is left when one
is killed.
"""

from __future__ import annotations

import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
from readme import ROOT, command
from servers import PREFECT, served, wait_for
from wheel import PATIENCE, all_rows, launched, write_recipe

from agentr_core.store.database import Store

CONTENT = (
    "select * exclude (created_at) from node order by all",
    "select * exclude (created_at) from judgement order by all",
    "select * exclude (created_at, environment_seconds, sampling_seconds) from episode order by all",
    "select hash from dataset",
    "select checkpoint_id, weights_sha256 from checkpoint order by all",
)


@dataclass(frozen=True)
class Pool:
    """The deployments of `prefect.yaml` on a work pool, and a recipe of the door whose runs are
    asked for there.
    """

    root: Path
    recipe: Path
    deployment: str
    env: Mapping[str, str]

    def store(self, name: str) -> Store:
        return Store(self.root / name / "store.duckdb")

    @contextmanager
    def worker(self) -> Iterator[Popen[str]]:
        """A worker for the length of the block."""
        with launched(prefect(command("prefect worker start --pool agentr --work-queue cpu")), env=self.env) as process:
            yield process

    def ask(self, workspace: str) -> str:
        """Ask for a run of the recipe in a workspace of its own; return its id."""
        parameters = {"recipe": str(self.recipe), "overrides": [f"workspace={self.root / workspace}"]}
        url = f"{self.env['PREFECT_API_URL']}/deployments/{self.deployment}/create_flow_run"
        # A busy server answers 503, or too late: then it is asked again, and knows what was asked.
        return str(wait_for(url, {"parameters": parameters, "idempotency_key": uuid.uuid4().hex})["id"])

    def state(self, run: str) -> str:
        return str(wait_for(f"{self.env['PREFECT_API_URL']}/flow_runs/{run}")["state"]["type"])

    def finish(self, workspace: str) -> None:
        """Ask for a run that takes up what is in a workspace; fail unless it ends well."""
        run = self.ask(workspace)
        wait(lambda: self.state(run) in ("COMPLETED", "FAILED", "CRASHED"))
        assert self.state(run) == "COMPLETED"
        assert self.store(workspace).query("select status from run")["status"].tolist() == ["finished"]


@pytest.fixture
def pool(tmp_path: Path, door_model: Path, serving_env: dict[str, str]) -> Iterator[Pool]:
    """A pool of the test's own, without workers."""
    with served(serving_env | {"AGENTR_HOME": str(ROOT), "DOOR_PAUSE": "0.1"}) as env:
        for start in ("prefect work-pool create", "prefect --no-prompt deploy"):
            process = subprocess.run(prefect(command(start)), cwd=ROOT, env=env, capture_output=True, text=True)
            assert process.returncode == 0, process.stdout + process.stderr
        query = {"deployments": {"name": {"any_": ["textcraft-tiny"]}}, "flows": {"name": {"any_": ["flywheel"]}}}
        (deployment,) = wait_for(f"{env['PREFECT_API_URL']}/deployments/filter", query)
        assert deployment["work_queue_name"] == "cpu"
        yield Pool(tmp_path, write_recipe(tmp_path, door_model), deployment["id"], env)


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_is_killed_and_another_goes_on(pool: Pool) -> None:
    store = pool.store("one")
    with pool.worker() as worker:
        pool.ask("one")
        wait(lambda: store.path.exists() and count(store, "node") > 5)
        kill_tree(worker.pid)
    rows = all_rows(store)
    assert count(store, "checkpoint") == 1, "the killed run was not in mid-work"
    with pool.worker():
        pool.finish("one")
    assert rows < all_rows(store), "what was stored stays as it was"


@pytest.mark.slow
@pytest.mark.long
def test_one_of_two_workers_is_killed_and_both_runs_end_alike(pool: Pool) -> None:
    stores = {name: pool.store(name) for name in ("one", "two")}
    with pool.worker() as worker, pool.worker():
        runs = {name: pool.ask(name) for name in stores}
        wait(lambda: all(store.path.exists() and count(store, "node") > 5 for store in stores.values()))
        kill_tree(worker.pid)
        wait(lambda: "COMPLETED" in map(pool.state, runs.values()))
        (workspace,) = (name for name, run in runs.items() if pool.state(run) != "COMPLETED")
        assert count(stores[workspace], "node") > 5
        assert count(stores[workspace], "checkpoint") == 1, "the killed run was not in mid-work"
        pool.finish(workspace)

    for question in CONTENT:
        assert stores["one"].query(question).equals(stores["two"].query(question)), question


def prefect(line: str) -> list[str]:
    return [PREFECT, *shlex.split(line)[1:]]


def count(store: Store, table: str) -> int:
    return int(store.query(f"select count(*) as n from {table}")["n"][0])


def kill_tree(pid: int) -> None:
    """Kill a worker and the runs it started, as a machine that goes down does."""
    worker = psutil.Process(pid)
    for process in (*worker.children(recursive=True), worker):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
