"""The shipped deployments on a Prefect server of a test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from readme import ROOT
from servers import PREFECT, wait_for
from wheel import PATIENCE

from agentr_core.reports.document import VIEWER_URL


def prefect(*words: str, env: Mapping[str, str]) -> str:
    process = subprocess.run([PREFECT, *words], cwd=ROOT, env=dict(env), capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def deploy(name: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Make one of the shipped deployments; return it."""
    prefect("--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "-n", name, env=env)
    flow, short_name = name.split("/")
    query = {"deployments": {"name": {"any_": [short_name]}}, "flows": {"name": {"any_": [flow]}}}
    (deployment,) = wait_for(f"{env['PREFECT_API_URL']}/deployments/filter", query)
    return dict(deployment)


def post(address: str, body: Any) -> Any:
    """Return what a server answers; a busy one is asked again, as by the client of Prefect."""
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = httpx.post(address, json=body, timeout=60)
        if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
            return answer.raise_for_status().json()
        time.sleep(1)


def check_artifacts(api: str, name: str, workspace: Path, flow_run: str) -> None:
    """Check that a run of one iteration left its scores, its report and its progress on the server,
    at the flow run that people look at, with a link to a page that a viewer serves.
    """
    (report,) = (workspace / "reports").glob("*/iteration-01.html")
    run_id = report.parent.name
    key = f"{name}-{run_id[:8]}"
    artifacts = post(f"{api}/artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    texts = {artifact["key"]: artifact["data"] for artifact in artifacts if artifact["key"]}
    assert "iteration 1" in texts[f"scores-{key}"]
    assert f"{VIEWER_URL}/report/{run_id}/iteration-01.html" in texts[f"report-{key}-1"]
    assert report.with_suffix(".md").read_text() in texts[f"report-{key}-1"]
    assert [artifact["data"] for artifact in artifacts if artifact["type"] == "progress"] == [100.0]


def runs_of(deployment: dict[str, Any], env: Mapping[str, str]) -> list[dict[str, Any]]:
    query = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    runs: list[dict[str, Any]] = post(f"{env['PREFECT_API_URL']}/flow_runs/filter", query)
    return runs
