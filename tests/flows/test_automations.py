"""The automations that are shipped, at a server of Prefect's own on SQLite: gathered trajectories
start a training, and a run that fails is told of.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from asgi import running
from deployed import deploy, post, prefect, runs_of
from readme import ROOT
from servers import served, wait_for
from starlette.types import Receive, Scope, Send
from wheel import PATIENCE, agentr, write_recipe

pytestmark = pytest.mark.slow
IMPROVE = "agentr: improve textcraft-tiny"
NOBODY = "00000000-0000-0000-0000-000000000000"


class Inbox:
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.bodies: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            message = await receive()
            self.bodies.append(message["body"].decode())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})


@pytest.mark.long
def test_gathered_trajectories_start_a_training_once_its_automation_is_on(
    tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    """Nothing is trained: no worker takes up the flow run that appears."""
    file = write_recipe(tmp_path, door_model)
    file.write_text(file.read_text("utf-8").replace("name: door\n", "name: textcraft-tiny\n", 1), encoding="utf-8")
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "AGENTR_HOME": str(ROOT)}
    with served(process_env | home) as env:

        def collect(limit: int, enough: int) -> None:
            words: list[str | Path] = ["collect", file, "--limit", str(limit), "--enough", str(enough), "-o", "seed=3"]
            process = agentr(*words, env=env)
            assert process.returncode == 0, process.stdout + process.stderr

        prefect("work-pool", "create", "agentr", "--type", "process", env=env)
        improve = deploy("improve/textcraft-tiny", env)
        collect(1, 1)
        wait_for_event(env, 1)
        assert runs_of(improve, env) == [], "it is shipped switched off"

        prefect("automation", "resume", IMPROVE, env=env)
        collect(2, 1000)
        wait_for_event(env, 2)
        collect(3, 2)
        (run,) = wait_for(
            f"{env['PREFECT_API_URL']}/flow_runs/filter", {"deployments": {"id": {"any_": [improve["id"]]}}}
        )
        # Time enough for one more, had the event before it started one.
        time.sleep(3)
        assert [flow_run["id"] for flow_run in runs_of(improve, env)] == [run["id"]]
    assert run["state_type"] in ("SCHEDULED", "PENDING")
    assert run["parameters"] == {
        "recipe": "deployments/recipes/textcraft-tiny.yaml",
        "overrides": ["seed=3"],
        "enough": 2,
    }


def wait_for_event(env: Mapping[str, str], count: int) -> None:
    """Wait until the server has so many events of gathered trajectories."""
    query = {"filter": {"event": {"name": ["agentr.trajectories.collected"]}}}
    deadline = time.monotonic() + PATIENCE
    while len(wait_for(f"{env['PREFECT_API_URL']}/events/filter", query)["events"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.long
def test_a_run_that_fails_is_told_of(tmp_path: Path, process_env: dict[str, str]) -> None:
    inbox = Inbox()
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "AGENTR_HOME": str(ROOT)}
    with running(inbox) as address, served(process_env | home) as env:
        api = env["PREFECT_API_URL"]
        prefect("work-pool", "create", "agentr", "--type", "process", env=env)
        deployment = deploy("flywheel/textcraft-tiny", env)
        block = webhook(api, address)
        automations = (ROOT / "deployments" / "automations.yaml").read_text("utf-8")
        (tmp_path / "automations.yaml").write_text(automations.replace(NOBODY, block), encoding="utf-8")
        prefect("automation", "create", "--from-file", str(tmp_path / "automations.yaml"), env=env)

        flow_run = post(f"{api}/deployments/{deployment['id']}/create_flow_run", {})
        for state in ("RUNNING", "FAILED"):
            payload = {"state": {"type": state, "message": "<b>the disk is full</b>"}, "force": True}
            post(f"{api}/flow_runs/{flow_run['id']}/set_state", payload)
        deadline = time.monotonic() + PATIENCE
        while not inbox.bodies:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    (body,) = inbox.bodies
    assert "flywheel/textcraft-tiny" in body
    assert "the disk is full" in body
    assert str(flow_run["id"]) in body, "the address of the flow run's page"


@pytest.mark.long
def test_an_alarm_is_told_of(tmp_path: Path, door_model: Path, process_env: dict[str, str]) -> None:
    inbox, file = Inbox(), write_recipe(tmp_path, door_model)
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "AGENTR_HOME": str(ROOT)}
    with running(inbox) as address, served(process_env | home) as env:
        api = env["PREFECT_API_URL"]
        prefect("block", "register", "--module", "prefect.blocks.notifications", env=env)
        automations = (ROOT / "deployments" / "automations.yaml").read_text("utf-8")
        (tmp_path / "automations.yaml").write_text(automations.replace(NOBODY, webhook(api, address)), encoding="utf-8")
        prefect("automation", "create", "--from-file", str(tmp_path / "automations.yaml"), env=env)
        # Replies of six tokens at most, of a model that knows no end.
        process = agentr("collect", file, "--limit", "2", "-o", "alarms.cut_replies=0.0", env=env)
        assert process.returncode == 0, process.stdout + process.stderr
        assert "alarm cut_replies, collect of iteration 1: " in process.stdout + process.stderr
        query = {"filter": {"event": {"name": ["agentr.alarm.raised"]}}}
        deadline = time.monotonic() + PATIENCE
        while not (events := wait_for(f"{api}/events/filter", query)["events"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        (event,) = events
        assert event["resource"]["agentr.alarm"] == "cut_replies"
        assert event["resource"]["agentr.reaction"] == event["payload"]["reaction"] == "tell"
        assert event["payload"]["iteration"] == 1
        assert inbox.bodies == [], "it was no run of a deployment with the tag"
        of_a_deployment = {"prefect.resource.id": "prefect.tag.agentr", "prefect.resource.role": "tag"}
        fields = {name: event[name] for name in ("event", "resource", "payload", "occurred")}
        events = [{**fields, "id": str(uuid4()), "related": [*event["related"], of_a_deployment]}]
        httpx.post(f"{api}/events", json=events).raise_for_status()
        while not inbox.bodies:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    (body,) = inbox.bodies
    assert "agentr: alarm cut_replies in door" in body
    assert "of the replies are cut by their token limit" in body


def webhook(api: str, address: str) -> str:
    """Make a block that posts notifications to an address; return its id."""
    kind = wait_for(f"{api}/block_types/slug/custom-webhook")
    query = {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}}
    schema, *_ = wait_for(f"{api}/block_schemas/filter", query)
    document = {
        "name": "inbox",
        "block_type_id": kind["id"],
        "block_schema_id": schema["id"],
        "data": {"name": "inbox", "url": address, "json_data": {"subject": "{{subject}}", "body": "{{body}}"}},
    }
    return str(post(f"{api}/block_documents/", document)["id"])
