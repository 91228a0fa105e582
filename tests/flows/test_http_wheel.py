"""The recipe over HTTP, cut short: its server dies in the middle, or comes back and begins with
other texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
import restless
from servers import free_port
from turning import Turned, turn
from wheel import PATIENCE, agentr, all_rows, environment, kill_group, started, wait_for

from agentr_core.errors import EnvironmentServerError
from agentr_core.store.database import Store
from agentr_core.system import start_in_thread as started_thread
from flows.preflight.checks import check
from tasks.wiring import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "textcraft-http.yaml"


@contextmanager
def textcraft_server(port: int, env: dict[str, str], name: str = "textcraft") -> Iterator[Popen[str]]:
    """Run `agentr env serve textcraft`, or of another world in its contract, for the length of the
    block.
    """
    with started("env", "serve", name, "--port", str(port), env=env) as process:
        assert process.stdout is not None
        assert f"{name} is served at http://127.0.0.1:{port}" in process.stdout.readline()
        yield process


def test_without_its_server_the_recipe_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    changes = [f"environment.options.url=http://127.0.0.1:{free_port()}", "environment.options.patience_s=0"]
    with pytest.raises(EnvironmentServerError, match="`agentr env serve textcraft` starts one"):
        check(load_recipe(RECIPE, [*changes, f"workspace={tmp_path}"]))


def at_least(least: int, what: str, store: Store) -> Callable[[], bool]:
    return lambda: store.path.exists() and int(store.query(f"select count(*) n from {what}")["n"][0]) >= least


@pytest.mark.slow
@pytest.mark.long
def test_a_server_that_dies_ends_the_run_in_a_sentence_and_costs_nothing_that_was_done(
    tmp_path: Path, served_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    port = free_port()
    changes = (
        f"workspace={tmp_path / 'runs'}",
        f"environment.options.url=http://127.0.0.1:{port}",
        "environment.options.patience_s=1",
        "instances.train_limit=8",
        "instances.test_limit=4",
        "search.dives=2",
        "search.width=3",
        "search.depth=6",
        "training.max_tokens=500",
        "evaluation.max_steps=4",
        "evaluation.revision_test.enabled=false",
    )
    command: tuple[str | Path, ...] = ("run", RECIPE, *(word for change in changes for word in ("-o", change)))
    store = Store(tmp_path / "runs" / "store.duckdb")

    with textcraft_server(port, served_env) as server, started(*command, env=served_env) as run:
        wait_for(run, at_least(12, "node", store), store)
        kill_group(server)
        _, stderr = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("agentr: ErrorBudgetSpent: ")
    assert "cannot be reached" in last
    assert "start the server" in last
    assert "Traceback" not in stderr
    rows_before = all_rows(store)

    with textcraft_server(port, served_env):
        result = agentr(*command, env=served_env)
        assert result.returncode == 0, result.stderr
        assert httpx.get(f"http://127.0.0.1:{port}/list_envs").json() == []
    assert rows_before < all_rows(store)
    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select count(*) n from tree where finished")["n"].tolist() == [8]
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [4, 4]
    assert store.query("select distinct class from event")["class"].tolist() == ["EnvironmentUnavailable"]
    assert store.query("select * from v_orphans").empty


@dataclass(frozen=True)
class Running:
    """A run in a thread of this process, for `wait_for`."""

    turned: Future[Turned]

    def poll(self) -> bool | None:
        return self.turned.done() or None

    def communicate(self) -> Turned:
        return self.turned.result()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_goes_on_when_its_server_comes_back_with_other_first_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run is in this process, and without Prefect: what goes away are its servers.
    `core/test_repeating.py` has the same with a server that forgets, in seconds.
    """
    monkeypatch.chdir(ROOT)
    env = environment(restless.install(tmp_path / "site"), tmp_path / "prefect")
    mortal = env | {restless.MORTAL: "1"}
    port = free_port()
    changes = (
        f"workspace={tmp_path / 'runs'}",
        f"environment.options.url=http://127.0.0.1:{port}",
        f"environment.options.patience_s={PATIENCE}",
        "instances.train_limit=4",
        "instances.test_limit=3",
        "search.dives=2",
        "search.width=2",
        "search.depth=3",
        "training.max_tokens=100",
        "evaluation.max_steps=3",
        "evaluation.revision_test.max_steps=2",
        # Few at a time, so that the server goes away under some with others still to come.
        "scale.concurrency=3",
        "errors.budget=0",
    )
    store = Store(tmp_path / "runs" / "store.duckdb")
    base = at_least(2, "episode", store)
    trained = at_least(
        2,
        "episode join evaluation using (evaluation_id) join iteration using (iteration_id) where iteration = 1",
        store,
    )

    # Should a server not be killed in time, it ends itself before any tree is done.
    with textcraft_server(port, mortal, "restless") as server:
        run = Running(started_thread(lambda: asyncio.run(turn(RECIPE, *changes)), name="run", daemon=True))
        wait_for(run, base, store)
        kill_group(server)
    with textcraft_server(port, mortal, "restless") as server:
        server.wait(timeout=PATIENCE)
    with textcraft_server(port, env, "restless") as server:
        wait_for(run, trained, store)
        kill_group(server)
    with textcraft_server(port, env, "restless"):
        assert run.turned.result(PATIENCE).report.is_file()
    assert "Traceback" not in "".join(capfd.readouterr())

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [3, 3]
    assert store.query("select count(*) n from tree where finished")["n"].tolist() == [4]
    events = store.query("select distinct class, level from event order by 1").values.tolist()
    assert ["TreeBegunAnew", "warning"] in events
    assert "error" not in {level for _, level in events}
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from v_contradictions").empty
