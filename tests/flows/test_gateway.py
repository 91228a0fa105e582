"""The commands of the README for outside agents, at small size: half of an agent's calls break, one
agent dies, and a run; what arrived is trained all the same, and nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen

import pytest
from click.testing import CliRunner
from outside import world
from readme import ROOT, command
from servers import free_port
from wheel import kill_group, launched, started, wait_for

from agentr_core.errors import EnvironmentServerError
from agentr_core.store.database import Store
from flows.cli import cli

ROLLOUTS = "trajectory where source = 'rollout'"
DROPPING = str(Path(__file__).parents[1] / "support" / "dropping.py")


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
        "evaluation.max_steps=2",
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
    logs = [tmp_path / "dies.jsonl", tmp_path / "lives.jsonl"]
    dying, living = ([sys.executable, DROPPING, script, address, "3", str(log), "5"] for log in logs)
    over = threading.Event()

    def replaced(dies: Popen[str]) -> None:
        """Kill the first agent at work, and have another one play until the run is over."""
        wait_for(dies, lambda: over.is_set() or explored(), store)
        kill_group(dies)
        with launched(living, env=served_env):
            over.wait()

    with started("gateway", "--port", str(port), env=served_env) as gateway:
        assert gateway.stdout is not None
        assert f"agents take episodes at {address}/episodes" in gateway.stdout.readline()
        with launched(dying, env=served_env) as dies, ThreadPoolExecutor(1) as other:
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
    check_delivered(store, logs)


def check_delivered(store: Store, logs: list[Path]) -> None:
    """Check that each trajectory has the replies that one agent got in one episode, in their order,
    and that a sample trains no other reply.
    """
    arrived = defaultdict(list)
    for log in logs:
        for line in log.read_text(encoding="utf-8").splitlines():
            episode, reply = json.loads(line)
            arrived[episode].append(reply)
    steps = store.query("select trajectory_id, list(reply order by position) replies from v_steps group by 1")
    played = Counter(tuple(replies) for replies in steps["replies"])
    assert played
    assert not played - Counter(map(tuple, arrived.values()))
    trained = "message m where m.train"
    assert store.query(f"select m.text from {trained} except select reply from v_steps").empty


@pytest.mark.slow
def test_beyond_this_machine_agents_and_runs_need_the_token(process_env: dict[str, str]) -> None:
    _, script, _, _ = shlex.split(command("python deployments/agents/textcraft.py"))
    with started("gateway", "--host", "0.0.0.0", "--port", "0", env=process_env) as gateway:
        assert gateway.stdout is not None
        line = gateway.stdout.readline()
        told = re.fullmatch(
            r"agents take episodes at http://0\.0\.0\.0:(\d+)/episodes, with the token as API key; "
            r"runs need AGENTR_GATEWAY=http://0\.0\.0\.0:\1 AGENTR_GATEWAY_TOKEN=(\S+)\n",
            line,
        )
        assert told, line
        url, token = f"http://127.0.0.1:{told[1]}", told[2]
        with pytest.raises(EnvironmentServerError, match="set AGENTR_GATEWAY_TOKEN"):
            world(url).reach()
        env = world(url, token=token, splits={"train": 374, "test": 100})
        agent = [sys.executable, str(ROOT / script), url, "1"]
        with launched(agent, env={**process_env, "AGENTR_GATEWAY_TOKEN": token}):
            assert "Goal:" in env.reset(env.instances("train")[0])
            assert env.step("Thought: Hm.\nAction: inventory").observation
        # It ends at once, though this process is still there, and waits.
        gateway.send_signal(signal.SIGINT)
        _, errors = gateway.communicate(timeout=60)
        env.close()
    assert (gateway.returncode, errors) == (130, "\ninterrupted\n")
