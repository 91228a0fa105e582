"""`deployments/prefect.yaml` on a work pool: two workers at the queue `cpu`, and what is left when
one is killed.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from readme import ROOT, command
from servers import PREFECT, served, wait_for
from wheel import PATIENCE, launched, write_recipe

from agentr_core.store import Store

CONTENT = (
    "select * exclude (created_at) from node order by all",
    "select * exclude (created_at) from judgement order by all",
    "select * exclude (created_at, environment_seconds, sampling_seconds) from episode order by all",
    "select hash from dataset",
    "select checkpoint_id, weights_sha256 from checkpoint order by all",
)


@pytest.mark.slow
def test_a_worker_is_killed_and_the_next_run_goes_on(
    tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    recipe = write_recipe(tmp_path, door_model)
    stores = {name: Store(tmp_path / name / "store.duckdb") for name in ("one", "two")}
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "AGENTR_HOME": str(ROOT), "DOOR_PAUSE": "0.1"}
    with served(process_env | home) as env:
        api = env["PREFECT_API_URL"]
        for start in ("prefect work-pool create", "prefect --no-prompt deploy"):
            subprocess.run(prefect(command(start)), cwd=ROOT, env=env, check=True, capture_output=True)
        (deployment,) = wait_for(f"{api}/deployments/filter", {"deployments": {"name": {"any_": ["textcraft-tiny"]}}})
        assert deployment["work_queue_name"] == "cpu"

        def ask(workspace: str) -> str:
            """Ask for a run of the recipe in a workspace of its own; return its id."""
            parameters = {"recipe": str(recipe), "overrides": [f"workspace={tmp_path / workspace}"]}
            url = f"{api}/deployments/{deployment['id']}/create_flow_run"
            return str(httpx.post(url, json={"parameters": parameters}).raise_for_status().json()["id"])

        def state(run: str) -> str:
            return str(httpx.get(f"{api}/flow_runs/{run}").raise_for_status().json()["state"]["type"])

        worker = prefect(command("prefect worker start --pool agentr --work-queue cpu"))
        with launched(worker, env=env) as first, launched(worker, env=env):
            runs = {name: ask(name) for name in stores}
            wait(lambda: all(store.path.exists() and count(store, "node") > 5 for store in stores.values()))
            kill_tree(first.pid)
            wait(lambda: "COMPLETED" in map(state, runs.values()))
            (left,) = (name for name, run in runs.items() if state(run) != "COMPLETED")
            before = count(stores[left], "node")
            assert count(stores[left], "checkpoint") == 1, "the killed run was not in mid-work"

            again = ask(left)
            wait(lambda: state(again) in ("COMPLETED", "FAILED", "CRASHED"))
            assert state(again) == "COMPLETED"

    assert before > 5
    for question in CONTENT:
        assert stores["one"].query(question).equals(stores["two"].query(question)), question
    assert stores[left].query("select status from run")["status"].tolist() == ["finished"]


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
