"""The commands of the README for outside agents, at small size: half of an agent's calls break, one
agent dies, and a run; what arrived is trained all the same, and nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen

import pytest
import small_agent
from click.testing import CliRunner
from outside import world
from readme import ROOT, command
from servers import free_port
from wheel import kill_group, launched, started, wait_for

from agentr_core.errors import EnvironmentFault, EnvironmentServerError, UserError
from agentr_core.store.database import Store
from flows.cli import cli

ROLLOUTS = "trajectory where source = 'rollout'"
DROPPING, MORTAL = (str(Path(__file__).parents[1] / "support" / name) for name in ("dropping.py", "mortal_agent.py"))


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
    changes = small(tmp_path / "runs", address)
    store = Store(tmp_path / "runs" / "store.duckdb")

    def explored() -> bool:
        return store.path.exists() and number(store, ROLLOUTS) > 1

    words = ("run", recipe, *changes)
    logs = [tmp_path / "dies.jsonl", tmp_path / "lives.jsonl"]
    dying_agent, living_agent = ([sys.executable, DROPPING, script, address, "3", str(log), "5"] for log in logs)
    over = threading.Event()

    def replaced(dies: Popen[str]) -> None:
        """Kill the first agent at work, and have another one play until the run is over."""
        wait_for(dies, lambda: over.is_set() or explored(), store)
        kill_group(dies)
        with launched(living_agent, env=served_env):
            over.wait()

    with started("gateway", "--port", str(port), env=served_env) as gateway:
        assert gateway.stdout is not None
        assert f"agents take episodes at {address}/episodes" in gateway.stdout.readline()
        with launched(dying_agent, env=served_env) as dies, ThreadPoolExecutor(1) as pool:
            future = pool.submit(replaced, dies)
            try:
                result = CliRunner().invoke(cli, words, catch_exceptions=False)
            finally:
                over.set()
            future.result()
    assert result.exit_code == 0, result.output

    events = store.query("select distinct class, level from event").values.tolist()
    assert ["EnvironmentTimeout", "warning"] in events
    assert number(store, ROLLOUTS) == 8
    check_trained(store)
    check_delivered(store, logs)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_of_a_launchers_copies_those_that_die_are_failures_and_never_trained(
    tmp_path: Path, served_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    port, log, store = free_port(), tmp_path / "lives.jsonl", Store(tmp_path / "runs" / "store.duckdb")
    _, script, _, _ = shlex.split(command("python deployments/agents/textcraft.py"))
    _, _, recipe = shlex.split(command("agentr run deployments/recipes/gateway-textcraft-tiny.yaml"))
    words = ("run", recipe, *small(tmp_path / "runs", f"http://127.0.0.1:{port}"), "-o", "errors.budget=1")
    copy = (sys.executable, MORTAL, str(ROOT / script), str(log))
    with started("gateway", "run", "--port", str(port), "--copies", "4", "--", *copy, env=served_env) as copies:
        assert copies.stdout is not None
        assert str(port) in copies.stdout.readline()
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output

    deaths = store.query("select count(*) n from event where message like '%ended by SIGKILL%'")["n"][0]
    assert deaths > 0
    assert 0 < number(store, ROLLOUTS) <= 8
    check_trained(store)
    # An episode that a run ends at its limit has the run's word, and ends its copy.
    check_delivered(store, [log], of="where trajectory_id in (select trajectory_id from trajectory where success)")


def small(workspace: Path, address: str) -> list[str]:
    """Return the words that make the README's recipe small, on a gateway at an address."""
    changes = (
        f"workspace={workspace}",
        f"environment.options.url={address}",
        "environment.options.patience_s=8",
        "instances.train_limit=4",
        "instances.test_limit=2",
        "evaluation.sets={}",
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
    return [word for change in changes for word in ("-o", change)]


def number(store: Store, of: str) -> int:
    return int(store.query(f"select count(*) n from {of}")["n"][0])


def check_trained(store: Store) -> None:
    """Check that a run ended, has the tokens of each reply, and trained just what was won."""
    tables = "step s join generation g on g.owner_id = s.trajectory_id and g.position = s.position"
    assert number(store, f"{tables} where len(g.token_ids) > 0") == number(store, "step")
    assert 0 < number(store, f"{ROLLOUTS} and success") == number(store, "sample where kind = 'good'")
    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select * from v_orphans").empty


def check_delivered(store: Store, logs: list[Path], *, of: str = "") -> None:
    """Check that each trajectory `of` some has the replies that one agent got in one episode, in
    their order, and that a sample trains no other reply.
    """
    by_episode = defaultdict(list)
    for log in logs:
        for line in log.read_text(encoding="utf-8").splitlines():
            episode, reply = json.loads(line)
            by_episode[episode].append(reply)
    steps = store.query(f"select trajectory_id, list(reply order by position) replies from v_steps {of} group by 1")
    counts = Counter(tuple(replies) for replies in steps["replies"])
    assert counts
    assert not counts - Counter(map(tuple, by_episode.values()))
    trained = "message m where m.train"
    assert store.query(f"select m.text from {trained} except select reply from v_steps").empty


@pytest.mark.slow
def test_beyond_this_machine_agents_and_runs_need_the_token(process_env: dict[str, str]) -> None:
    _, script, _, _ = shlex.split(command("python deployments/agents/textcraft.py"))
    with started("gateway", "--host", "0.0.0.0", "--port", "0", env=process_env) as gateway:
        assert gateway.stdout is not None
        line = gateway.stdout.readline()
        match = re.fullmatch(
            r"agents take episodes at http://0\.0\.0\.0:(\d+)/episodes, with the token as API key; "
            r"runs need AGENTR_GATEWAY=http://0\.0\.0\.0:\1 AGENTR_GATEWAY_TOKEN=(\S+)\n",
            line,
        )
        assert match, line
        url, token = f"http://127.0.0.1:{match[1]}", match[2]
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_launcher_that_ends_ends_its_copies(
    tmp_path: Path, process_env: dict[str, str], number: signal.Signals, status: int
) -> None:
    agent = [sys.executable, small_agent.__file__, "ask", f"child:{tmp_path / 'pid'}", "sleep:600"]
    words = ("gateway", "run", "--port", "0", "--copies", "1", "--", *agent)
    with started(*words, env=process_env) as copies:
        assert copies.stdout is not None
        url = re.findall(r"AGENTR_GATEWAY=(\S+)", copies.stdout.readline())[0]
        env = world(url)
        assert env.reset(env.instances("train")[0]).startswith("Question 0")
        with ThreadPoolExecutor(1) as pool:
            # Its reply has the agent go on.
            future = pool.submit(env.step, "A reply.")
            wait_for(copies, (tmp_path / "pid").exists)
            wait_for(copies, lambda: bool((tmp_path / "pid").read_text()))
            copies.send_signal(number)
            out, errors = copies.communicate(timeout=60)
            with pytest.raises(EnvironmentFault, match="the launcher was ended" if status > 0 else None):
                future.result()
        env.close()
    assert copies.returncode == status
    if status > 0:
        assert (out, errors.strip()) == ("0 at work; 0 episodes over\n", "interrupted")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_launcher_whose_input_is_closed_plays_all_the_same(process_env: dict[str, str]) -> None:
    agent = (sys.executable, small_agent.__file__, "ask", "exit:0")
    command = [sys.executable, "-m", "flows.cli", "gateway", "run", "--port", "0", "--reward", "exit", "--", *agent]
    with launched(["sh", "-c", f"exec {shlex.join(command)} <&-"], env=process_env) as copies:
        assert copies.stdout is not None
        env = world(re.findall(r"AGENTR_GATEWAY=(\S+)", copies.stdout.readline())[0])
        env.reset(env.instances("train")[0])
        assert env.step("A reply.").reward == 1
        copies.send_signal(signal.SIGINT)
        _, errors = copies.communicate(timeout=60)
        env.close()
    assert (copies.returncode, errors.strip()) == (130, "interrupted")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no-such-agent"], "there is no program 'no-such-agent'; name one that can be run"),
        (["python", "{url}"], "{url} is no placeholder of a command; there are task, task_file, "),
        (["--score", "no-such-grader", "python"], "there is no program 'no-such-grader'"),
        (["--score", "'", "python"], "No closing quotation; quote it as for a shell"),
        (["--score", " ", "python"], "it has no words"),
        (["--score", "x", "--reward", "line", "python"], "--reward says who tells the reward, and --score names"),
        (["--url", "http://127.0.0.1:1", "--port", "3", "python"], "--port is that of a gateway to serve, and --url"),
        (["--url", "here", "python"], "'here' is no address of the web"),
        (["--copies", "0", "python"], "0 is not in the range"),
        (["--port", "{taken}", "python"], "cannot listen on 127.0.0.1:{taken} (Address already in use); choose"),
        ([], "Missing argument 'COMMAND...'"),
    ],
)
def test_a_launcher_that_cannot_begin_says_why(words: list[str], sentence: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
        words, sentence = [word.replace("{taken}", port) for word in words], sentence.replace("{taken}", port)
        result = CliRunner().invoke(cli, ["gateway", "run", *words])
    message = str(result.exception) if isinstance(result.exception, UserError) else result.output
    assert sentence in message
    assert isinstance(result.exception, UserError) or result.exit_code == 2
