"""The commands of the README for outside agents, at small size: an agent dies, and is trained all
the same.
"""

from __future__ import annotations

import shlex
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen

import pytest
from click.testing import CliRunner
from readme import ROOT, command
from servers import free_port
from wheel import kill_group, launched, started, wait_for

from agentr_core.store import Store
from flows.cli import cli

ROLLOUTS = "trajectory where source = 'rollout'"


@pytest.mark.slow
# Prefect leaves the sockets of its event clients to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_an_outside_agent_is_trained_on_what_it_won_though_one_dies(
    tmp_path: Path, served_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    _, script, _, _ = shlex.split(command("python deployments/agents/textcraft.py"))
    _, _, recipe = shlex.split(command("agentr run deployments/recipes/gateway-textcraft-tiny.yaml"))
    changes = (
        f"workspace={tmp_path / 'runs'}",
        f"environment.options.url={address}",
        "environment.options.patience_s=8",
        "instances.train_limit=4",
        "instances.test_limit=2",
        "eto.explore.samples=2",
        "eto.explore.temperature=0.2",
        # What is won is won in two steps.
        "eto.explore.max_steps=6",
        "evaluation.max_steps=6",
        "training.max_tokens=100",
        # Each further process imports torch anew, and here there is little for it to do.
        "training.launch=null",
        "model.workers=1",
        "data.general.share=0",
        "errors.budget=0.5",
    )
    store = Store(tmp_path / "runs" / "store.duckdb")

    def number(of: str) -> int:
        return int(store.query(f"select count(*) n from {of}")["n"][0])

    def explored() -> bool:
        return store.path.exists() and number(ROLLOUTS) > 1

    words = ("run", recipe, *(word for change in changes for word in ("-o", change)))
    agent = [sys.executable, script, address, "3"]
    over = threading.Event()

    def replaced(dies: Popen[str]) -> None:
        """Kill the first agent at work, and have another one play until the run is over."""
        wait_for(dies, lambda: over.is_set() or explored(), store)
        kill_group(dies)
        with launched(agent, env=served_env):
            over.wait()

    with started("gateway", "--port", str(port), env=served_env) as gateway:
        assert gateway.stdout is not None
        assert f"agents take episodes at {address}/episodes" in gateway.stdout.readline()
        with launched(agent, env=served_env) as dies, ThreadPoolExecutor(1) as other:
            killed = other.submit(replaced, dies)
            try:
                ran = CliRunner().invoke(cli, words, catch_exceptions=False)
            finally:
                over.set()
            killed.result()
    assert ran.exit_code == 0, ran.output

    events = store.query("select distinct class, level from event").values.tolist()
    assert ["EnvironmentTimeout", "warning"] in events
    assert number(ROLLOUTS) == 8
    sampled = "step s join generation g on g.owner_id = s.trajectory_id and g.position = s.position"
    assert number(f"{sampled} where len(g.token_ids) > 0") == number("step")
    assert 0 < number(f"{ROLLOUTS} and success") == number("sample where kind = 'good'")
    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select * from v_orphans").empty
