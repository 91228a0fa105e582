"""A deployment as a person uses it: on a Prefect server, with `agentr serve`, and a run asked for
from the command line.
"""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path

import pytest
from deployed import check_artifacts
from servers import PREFECT, wait_for
from wheel import PATIENCE, launched, started, write_recipe

from agentr_core.errors import StoreError
from agentr_core.store.connection import LOCK_FOLDER
from agentr_core.store.database import Store
from flows import stages
from flows.flywheel import flywheel
from tasks import wiring
from tasks.wiring import RunRef


@pytest.mark.slow
@pytest.mark.long
def test_a_deployment_runs_and_leaves_artifacts(tmp_path: Path, door_model: Path, served_env: dict[str, str]) -> None:
    """Asked for by a person. A run that a schedule asks for, in test_schedules.py, has the main of
    it: it is served in the same way, and leaves the same artifacts.
    """
    # Other tests run flows on this server, too; artifacts are named after recipe and run.
    recipe = write_recipe(tmp_path, door_model, name="deployed")
    api = served_env["PREFECT_API_URL"]
    with started("serve", recipe, env=served_env) as serving:
        wait_for(f"{api}/deployments/filter", {"deployments": {"name": {"any_": ["deployed"]}}})
        command = [PREFECT, "deployment", "run", "flywheel/deployed", "-p", "iterations=1", "--watch"]
        with launched(command, env=served_env) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert serving.poll() is None
    asked_for = {"deployments": {"name": {"any_": ["deployed"]}}, "flows": {"name": {"any_": ["flywheel"]}}}
    (flow_run,) = wait_for(f"{api}/flow_runs/filter", asked_for)

    assert process.returncode == 0, out + err
    assert flow_run["state_name"] == "Completed"
    check_artifacts(api, "deployed", tmp_path / "runs", flow_run["id"])
    assert Store(tmp_path / "runs" / "store.duckdb").query("select status from run")["status"].tolist() == ["finished"]


# Prefect leaves the sockets of its event clients to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.usefixtures("prefect_server", "door_installed")
async def test_a_second_start_of_a_run_at_work_is_cancelled_with_its_sentence(tmp_path: Path, door_model: Path) -> None:
    recipe = write_recipe(tmp_path, door_model, name="twice")
    run = wiring.run_reference(wiring.load_recipe(recipe, []))
    lock = Path(run.workspace) / LOCK_FOLDER / run.run_id
    lock.parent.mkdir(parents=True)
    with lock.open("w") as elsewhere:
        fcntl.flock(elsewhere, fcntl.LOCK_EX)
        state = await flywheel(str(recipe), return_state=True)
    assert state.is_cancelled()
    assert str(state.message).startswith(f"run {run.run_id} is already under way in ")


def test_a_stage_works_in_the_workspace_of_its_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workspaces: list[str] = []

    async def perform(run: RunRef, iteration: int, name: str) -> None:
        workspaces.append(run.workspace)

    monkeypatch.setattr("tasks.stages.perform", perform)
    monkeypatch.setattr(stages, "stored_recipe", lambda workspace, run_id: None)
    monkeypatch.chdir(tmp_path)
    stage = stages.flow_of_stage("train").fn
    monkeypatch.delenv("AGENTR_WORKSPACE", raising=False)
    asyncio.run(stage("aaaa000000000001", 1))
    monkeypatch.setenv("AGENTR_WORKSPACE", "disk/runs")
    asyncio.run(stage("aaaa000000000001", 1))
    asyncio.run(stage("aaaa000000000001", 1, "mine"))
    assert workspaces == ["runs", "disk/runs", "mine"]


def test_a_stage_makes_no_workspace(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        asyncio.run(stages.flow_of_stage("train").fn("aaaa000000000001", 1, str(tmp_path / "misspelt")))
    assert list(tmp_path.iterdir()) == []
