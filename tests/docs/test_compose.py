"""The compose file of a team: its services fit together, and their commands and variables exist."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest
import yaml
from prefect.cli._app import _app
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields
from readme import ROOT

from flows.cli import cli

FILE = ROOT / "deployments" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
HERE = "/opt/agentr"


def commands(service: dict[str, Any]) -> list[list[str]]:
    """Return the commands of a service, those of a shell line one by one."""
    words = service.get("command", [])
    if words[:2] != ["sh", "-c"]:
        return [words]
    return [shlex.split(part.replace("$$", "$"))[part.strip().startswith("exec ") :] for part in words[2].split("&&")]


ALL = [(name, words) for name, service in SERVICES.items() for words in commands(service)]


def test_it_has_what_a_team_needs() -> None:
    assert {"postgres", "prefect", "worker-cpu", "worker-gpu", "vllm", "viewer"} <= SERVICES.keys()
    for name, service in SERVICES.items():
        assert service["image"] == ("postgres:17" if name == "postgres" else "agentr:0.2.0")


def test_services_wait_for_what_can_be_waited_for() -> None:
    for service in SERVICES.values():
        for dependency, how in service.get("depends_on", {}).items():
            healthy = "healthcheck" in SERVICES[dependency]
            assert how["condition"] == ("service_healthy" if healthy else "service_completed_successfully")
            assert healthy or SERVICES[dependency]["restart"] == "no"
        network = service.get("network_mode", "service:postgres").removeprefix("service:")
        assert network in SERVICES
    for name in ("postgres", "prefect", "vllm"):
        assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


def test_volumes_are_declared_and_folders_are_those_of_the_checkout() -> None:
    volumes = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {name for name in volumes if not name.startswith(".")} == set(COMPOSE["volumes"])
    assert {name for name in volumes if name.startswith(".")} == {"../models"}
    worker = SERVICES["worker-cpu"]
    assert worker["environment"]["AGENTR_HOME"] == worker["working_dir"] == HERE
    assert (FILE.parent / COMPOSE["x-agentr"]["build"]["context"]).resolve() == ROOT
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".venv", "runs", "models"} <= set(patterns), "the image is not made of what lies in a checkout by chance"


def test_nothing_is_open_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "${POSTGRES_PASSWORD:?" in SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"]


@pytest.mark.parametrize(("name", "words"), ALL, ids=lambda each: each if isinstance(each, str) else " ".join(each[:3]))
def test_commands_exist(name: str, words: list[str]) -> None:
    program, *rest = words or ["postgres"]
    if program == "agentr":
        command: click.Command = cli
        while isinstance(command, click.Group):
            command = command.commands[rest.pop(0)]
        command.make_parser(click.Context(command)).parse_args(rest)
    elif program == "prefect":
        _app.parse_args([word for word in rest if word != "--no-prompt"], exit_on_error=False, print_error=False)
    else:
        assert (name, program) in {("postgres", "postgres"), ("shell", "bash")}
    for file in (word for word in words if word.endswith(".yaml")):
        assert (ROOT / file).is_file()


def test_workers_are_those_of_the_deployments() -> None:
    worker_commands = [words for _, words in ALL if words[:3] == ["prefect", "worker", "start"]]
    config = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))
    queues = {(each["work_pool"]["name"], each["work_pool"]["work_queue_name"]) for each in config["deployments"]}
    assert {(words[4], words[6]) for words in worker_commands} == queues


def test_variables_are_known() -> None:
    prefects = {setting.name for setting in _get_settings_fields(Settings).values()}
    code = "".join(
        path.read_text(encoding="utf-8") for folder in ("flows", "tasks") for path in (ROOT / folder).rglob("*.py")
    )
    for service in SERVICES.values():
        for name in service.get("environment", {}):
            if name.startswith("PREFECT_"):
                assert name in prefects, name
            elif name.startswith("AGENTR_") and name not in ("AGENTR_HOME", "AGENTR_MODEL"):
                assert re.search(rf'"{name}"', code), name
