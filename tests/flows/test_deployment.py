"""A deployment as a person uses it: a Prefect server, `agentr serve`, and a run asked for from the command line."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from wheel import launched, started, write_recipe

from agentr_core.store import Store

PREFECT = str(Path(sys.executable).with_name("prefect"))


def free_port() -> int:
    """Return a free port of this machine; skip the test where there is none to be had."""
    with closing(socket.socket()) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            pytest.skip(f"no port can be bound here: {error}")
        return int(probe.getsockname()[1])


def wait_for(url: str, body: object = None, *, seconds: float = 60) -> Any:
    """Return the answer of a server once it is neither an error nor empty."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(url) if body is None else httpx.post(url, json=body)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if answer.status_code == 200 and (found := answer.json()):
            return found
        time.sleep(0.2)
    raise AssertionError(f"{url} gave nothing for {seconds} s")


@pytest.mark.slow
def test_a_deployment_runs_and_leaves_artifacts(tmp_path: Path, door_model: Path, process_env: dict[str, str]) -> None:
    recipe = write_recipe(tmp_path, door_model)
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    env = process_env | {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": api}
    serve = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]

    with launched(serve, env=env):
        wait_for(f"{api}/health")
        with started("serve", recipe, env=env) as serving:
            wait_for(f"{api}/deployments/filter", {"deployments": {"name": {"any_": ["door"]}}})
            command = [PREFECT, "deployment", "run", "flywheel/door", "-p", "iterations=1", "--watch"]
            with launched(command, env=env) as asked:
                out, err = asked.communicate(timeout=120)
            assert serving.poll() is None
        artifacts = wait_for(f"{api}/artifacts/filter", {})
        (state,) = (
            run["state_name"]
            for run in wait_for(f"{api}/flow_runs/filter", {"flows": {"name": {"any_": ["flywheel"]}}})
        )

    assert asked.returncode == 0, out + err
    assert state == "Completed"
    (report,) = (tmp_path / "runs" / "reports").glob("*/iteration-01.html")
    texts = {artifact["key"]: artifact["data"] for artifact in artifacts}
    name = f"door-{report.parent.name[:8]}"
    assert "iteration 1" in texts[f"scores-{name}"]
    assert report.as_uri() in texts[f"report-{name}-1"]
    assert Store(tmp_path / "runs" / "store.duckdb").query("select status from run")["status"].tolist() == ["finished"]
