"""Schedules as Prefect's own scheduler and the clock treat them, and what a run says that a
schedule asked for with a parameter which its flow lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from asgi import running
from deployed import check_artifacts, deploy, post, prefect, runs_of
from readme import ROOT
from servers import served, wait_for
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from wheel import LIGHT, PATIENCE, agentr, launched, sentence, started, write_recipe
from wheel import wait_for as wait_while

pytestmark = pytest.mark.slow
MISSPELT = (
    "unknown parameter itertions (did you mean iterations?); flow flywheel takes recipe, overrides, iterations, more, "
    "settings"
)


def test_a_schedule_plans_its_runs_and_the_clock_starts_them(
    tmp_path: Path, door_model: Path, serving_env: dict[str, str]
) -> None:
    recipe = write_recipe(tmp_path, door_model, name="nightly")
    with served(serving_env | {"AGENTR_HOME": str(ROOT)}) as env:
        api = env["PREFECT_API_URL"]
        # What the command line asks for, at a tenth of its cost.
        post(f"{api}/work_pools/", {"name": "agentr", "type": "process"})
        deployment = deploy("flywheel/textcraft-tiny-nightly", env)
        assert runs_of(deployment, env) == [], "it is shipped switched off"
        resume = ("deployment", "schedule", "resume", "flywheel/textcraft-tiny-nightly")
        prefect(*resume, deployment["schedules"][0]["id"], env=env)
        wait_for(f"{api}/flow_runs/filter", {"deployments": {"id": {"any_": [deployment["id"]]}}})
        for flow_run in runs_of(deployment, env):
            start = datetime.fromisoformat(flow_run["expected_start_time"])
            assert (start.hour, start.minute, flow_run["state_type"]) == (3, 0, "SCHEDULED")
            assert flow_run["parameters"] == {"recipe": "deployments/recipes/textcraft-tiny.yaml", "more": 1}
        assert health(env, PATIENCE)[0] == f"scheduler: the server at {api} plans the runs of schedules\n"

        with started("serve", recipe, env=env) as serving:
            query = {"deployments": {"name": {"any_": ["nightly"]}}, "flows": {"name": {"any_": ["flywheel"]}}}
            (nightly,) = wait_for(f"{api}/deployments/filter", query)
            soon = planned_soon(nightly, ("more", "itertions"), env)

            def final_runs() -> list[dict[str, Any]]:
                # A run that is misspelt is Crashed for a moment, until its hook has looked at it.
                return [run for run in runs_of(nightly, env) if run["state_type"] in ("COMPLETED", "FAILED")]

            # Each look is a request, which the server answers on the processor that the runs want.
            wait_while(serving, lambda: len(final_runs()) == 2, every=1.0)
            runs = {"more" in run["parameters"]: run for run in final_runs()}
        check_artifacts(api, "nightly", tmp_path / "runs", runs[True]["id"])
    assert runs[True]["state_type"] == "COMPLETED"
    assert runs[True]["auto_scheduled"]
    assert datetime.fromisoformat(runs[True]["start_time"]) >= soon
    assert runs[False]["state_type"] == "FAILED"
    assert runs[False]["state"]["message"] == MISSPELT


def planned_soon(deployment: dict[str, Any], parameters: Iterable[str], env: Mapping[str, str]) -> datetime:
    """Give a deployment a daily schedule for each of some parameters; return when the first runs
    start.

    The server plans every five seconds, later when it is busy, and what was due before it planned
    starts a day later: then it is asked again, for a later moment.
    """
    api = env["PREFECT_API_URL"]
    for ahead in (8, 32, 128):
        soon = datetime.now(UTC) + timedelta(seconds=ahead)
        daily = {"interval": 86_400, "anchor_date": soon.isoformat()}
        schedules = [{"schedule": daily, "parameters": {name: 1, "overrides": LIGHT}} for name in parameters]
        new_schedules = post(f"{api}/deployments/{deployment['id']}/schedules", schedules)
        wait_for(f"{api}/flow_runs/filter", {"deployments": {"id": {"any_": [deployment["id"]]}}})
        starts = [datetime.fromisoformat(run["expected_start_time"]) for run in runs_of(deployment, env)]
        if min(starts) - soon < timedelta(hours=1):
            return soon
        for schedule in new_schedules:
            address = f"{api}/deployments/{deployment['id']}/schedules/{schedule['id']}"
            httpx.delete(address, timeout=60).raise_for_status()
    raise AssertionError("the server planned nothing in time")


@pytest.mark.long
def test_the_doctor_knows_a_server_without_a_scheduler(serving_env: dict[str, str]) -> None:
    with served(serving_env | {"PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false"}) as env:
        out, err = health(env, seconds=6)
    assert out == ""
    refusal = f"the Prefect server at {env['PREFECT_API_URL']} planned no run within 6 seconds, so no schedule fires"
    assert f"ConfigError: {refusal}" in err


def health(env: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Return what the doctor's question to a scheduler prints; nothing stays on the server."""
    code = f"from flows import scheduler; print(scheduler.scheduler_line(timeout_seconds={seconds}))"
    flows = post(f"{env['PREFECT_API_URL']}/flows/filter", {})
    with launched([sys.executable, "-c", code], env=env) as process:
        outputs = process.communicate(timeout=PATIENCE)
    assert post(f"{env['PREFECT_API_URL']}/flows/filter", {}) == flows, "what it asked with is gone"
    return outputs


def test_the_doctor_knows_a_server_whose_scheduler_fails(process_env: dict[str, str]) -> None:
    """As Prefect 3.8 with SQLAlchemy 2.1 is: its API does not plan either."""

    async def fail(request: Request) -> JSONResponse:
        return JSONResponse({"exception_message": "Service Unavailable"}, status_code=503)

    async def make(request: Request) -> JSONResponse:
        return JSONResponse({"id": str(uuid4())}, status_code=201)

    async def healthy(request: Request) -> JSONResponse:
        return JSONResponse(True)

    ids = list[str]()

    async def delete(request: Request) -> JSONResponse:
        ids.append(request.path_params["id"])
        return JSONResponse(None)

    app = Starlette(
        routes=[
            Route("/api/health", healthy),
            Route("/api/flows/", make, methods=["POST"]),
            Route("/api/deployments/", make, methods=["POST"]),
            Route("/api/deployments/{id}/schedule", fail, methods=["POST"]),
            Route("/api/flows/{id}", delete, methods=["DELETE"]),
        ]
    )
    with running(app) as address:
        done = agentr("doctor", env=process_env | {"PREFECT_API_URL": f"{address}/api"})
    assert done.returncode == 2
    assert sentence(done.stderr) == (
        f"the Prefect server at {address}/api fails to plan a run (status 503, its log has the reason), so no schedule "
        "fires; install it with the versions of constraints.txt"
    )
    assert len(ids) == 1
