"""Prefect's own server lives as long as the process that started it, however that ends."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import httpx
import psutil
import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, PREFECT_HOME, temporary_settings
from wheel import PATIENCE, launched

from agentr_core.errors import ConfigError, ServerLost
from agentr_core.methods.faults import parse
from agentr_core.recipes.recipe import Recipe
from flows import local, server
from flows.serving import serve_recipes

pytestmark = pytest.mark.slow
SERVED = """
import time
from flows import server
server.ensure_server()
print("reached", flush=True)
time.sleep(600)
"""


OUTLIVES = """
import signal, sys, time
import httpx
from prefect.server.api.server import SubprocessASGIServer
from flows import server
server.ensure_server()
def look(*_):
    time.sleep(3)
    address = f"http://127.0.0.1:{next(iter(SubprocessASGIServer._instances.values())).port}/api/health"
    print(httpx.get(address, timeout=30).text, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, look)
signal.signal(signal.SIGINT, look)
print("reached", flush=True)
time.sleep(600)
"""


TERMINATED = """
import asyncio, os, signal
from prefect import flow, task
from flows import interruption, server
@task
async def cleaned():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print("in order", flush=True)
@flow
async def ended():
    await cleaned()
server.ensure_server()
try:
    interruption.run(ended())
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    print("interrupted", flush=True)
"""


@contextmanager
def serve_process(env: Mapping[str, str]) -> Iterator[Popen[str]]:
    """A process that has reached its server, and goes on."""
    path = os.pathsep.join(filter(None, sys.path))
    with launched([sys.executable, "-c", SERVED], env={**env, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached\n"
        yield process


def family(process: Popen[str]) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return children


def test_a_run_does_without_a_guard_where_there_are_no_process_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with Popen([sys.executable, "-c", ""]) as process:
        assert not server._start_guard(process)


def has_descriptors() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_descriptors(), reason="the system has no process descriptors")
def test_the_server_ends_with_a_killed_process_and_lets_its_output_go(serving_env: dict[str, str]) -> None:
    with serve_process(serving_env) as process:
        children = family(process)
        assert any("prefect.server.api.server:create_app" in child.cmdline() for child in children)
        process.kill()

        process.communicate(timeout=PATIENCE / 10)
        _, children = psutil.wait_procs(children, timeout=PATIENCE / 10)
        assert not children


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_outlives_what_ends_the_whole_group(serving_env: dict[str, str], number: signal.Signals) -> None:
    """The process then ends in order, and once it has, nobody is left of its server."""
    path = os.pathsep.join(filter(None, sys.path))
    with launched([sys.executable, "-c", OUTLIVES], env={**serving_env, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached\n"
        children = family(process)
        commands = [child.cmdline() for child in children]
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=PATIENCE / 10)
        assert (process.returncode, out) == (0, "true\n"), err
        assert any("prefect.server.api.server:create_app" in command for command in commands)
        assert not [child for child in children if child.is_running()]


def test_a_terminated_flow_is_an_interrupted_one(served_env: dict[str, str]) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    with launched([sys.executable, "-c", TERMINATED], env={**served_env, "PYTHONPATH": path}) as process:
        out, err = process.communicate(timeout=PATIENCE / 10)
        assert (process.returncode, out) == (0, "in order\ninterrupted\n"), err


@pytest.mark.parametrize("ours", [True, False])
def test_a_server_that_goes_away_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """Whose error it is can be told apart: another one is no fault of Prefect's server."""

    async def call_server(recipe: Recipe) -> None:
        async with get_client() if ours else httpx.AsyncClient(base_url="http://127.0.0.1:9") as client:
            await (client.hello() if isinstance(client, PrefectClient) else client.get("/hello"))

    monkeypatch.setattr(local, "check", lambda recipe, trains: [])
    monkeypatch.setattr(server, "ensure_server", lambda: None)
    settings = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    pattern = r"^Prefect's server at http://127\.0\.0\.1:9 answers no longer \(.*\); start it again, and then the same "
    with (
        temporary_settings(settings),
        pytest.raises(ServerLost if ours else httpx.ConnectError, match=pattern if ours else None),
    ):
        local._run(call_server, parse({"name": "lost", "model": {"path": "nowhere"}}))


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_server_that_could_keep_nothing_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    with (
        temporary_settings({PREFECT_HOME: file / "prefect"}, restore_defaults={PREFECT_API_URL}),
        pytest.raises(ConfigError, match="which cannot be made or written to; set PREFECT_HOME to another folder"),
    ):
        server.ensure_server()


def test_a_deployment_of_a_work_pool_is_not_served_away_from_it(prefect_server: None) -> None:
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="machines", type="process"))
        flow_id = client.create_flow_from_name("flywheel")
        client.create_deployment(flow_id=flow_id, name="textcraft-tiny", work_pool_name="machines")
        client.create_deployment(flow_id=flow_id, name="textcraft-climb")
    names = ["flywheel/textcraft-tiny", "flywheel/textcraft-climb", "flywheel/none"]
    assert server.deployments_on_work_pools(names) == ["flywheel/textcraft-tiny"]
    with pytest.raises(ConfigError, match="flywheel/textcraft-tiny on this server belong to work pools"):
        serve_recipes([Path("deployments/recipes/textcraft-tiny.yaml")])
