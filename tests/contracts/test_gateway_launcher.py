"""Copies of a command at a real gateway: what each way of ending becomes."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import small_agent
from asgi import running
from outside import count, world

from agentr_core.environments.gateway import launcher
from agentr_core.environments.gateway.launcher import Launch, Launcher, read_reward, resolved_command
from agentr_core.environments.gateway.server import app
from agentr_core.episodes.rollout import EnvironmentPool, roll_out_episode
from agentr_core.errors import ConfigError, EnvironmentServerError
from agentr_core.models.scripted import ScriptedModel
from agentr_core.types import Generation, Instance, Request, Sampling, Trajectory

AGENT = (sys.executable, "-S", small_agent.__file__)


@pytest.fixture
def url() -> Iterator[str]:
    with running(app()) as address:
        yield address


@dataclass
class Work:
    """What became of episodes that copies played."""

    episodes: list[Trajectory | BaseException] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes if isinstance(episode, Trajectory)]

    @property
    def reasons(self) -> list[str]:
        return [str(episode) for episode in self.episodes if not isinstance(episode, Trajectory)]


async def offer_episode(url: str, index: int = 1, *, max_steps: int = 9, **options: Any) -> Trajectory:
    """Return an episode that whoever takes it plays."""
    model = ScriptedModel(count, context_length=1000)

    async def sample(request: Request) -> list[Generation]:
        (replies,) = await model.generate([request])
        return replies

    instance = Instance(environment="gateway", split="train", index=index)
    async with EnvironmentPool(lambda _: world(url, **options)).lend(instance) as env:
        return await roll_out_episode(instance, env, sample, max_steps=max_steps, sampling=Sampling(), seed=1)


async def work(
    url: str, *words: str, episodes: int = 1, command: tuple[str, ...] = AGENT, options: Any = None, **launch: Any
) -> Work:
    """Return what became of episodes that were offered while copies of the small agent ran."""
    done = Work()
    settings = Launch(command=(*command, *words), **{"num_copies": 2, **launch})
    copies = Launcher(settings, url=url, token="", print_line=done.lines.append)
    task = asyncio.ensure_future(copies.run())
    options = {"patience_s": 12.0, **(options or {})}
    offers = asyncio.gather(*(offer_episode(url, **options) for _ in range(episodes)), return_exceptions=True)
    await asyncio.wait((task, offers), return_when=asyncio.FIRST_COMPLETED)
    while not task.done() and not copies.summary().startswith("0 at work"):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))
    done.error = None if task.cancelled() else task.exception()
    done.episodes = list(await offers)
    return done


@pytest.mark.slow
async def test_an_agent_posts_its_reward(url: str) -> None:
    done = await work(url, "ask", "ask", "reward:0.25", episodes=3)
    assert done.error is None, done
    assert [(len(each.steps), each.reward) for each in done.episodes if isinstance(each, Trajectory)] == [(2, 0.25)] * 3
    assert done.lines == ["0 at work; 3 episodes over: 3 rewarded"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words", "reward"),
    [
        ("line", ["say:hello", "say:0.75", "say:"], 0.75),
        ("line", ['say:{"reward": 1, "success": false, "other": 2}'], 1.0),
        ("exit", ["exit:0"], 1.0),
        ("exit", ["exit:3"], 0.0),
        ("exit", ["complain:wrong", "exit:255"], 0.0),
    ],
)
async def test_what_a_command_ends_with_is_its_reward(url: str, way: Any, words: list[str], reward: float) -> None:
    done = await work(url, "ask", *words, reward_source=way)
    assert (done.error, done.rewards) == (None, [reward])
    assert [each.success for each in done.episodes if isinstance(each, Trajectory)] == [
        reward == 1 and "success" not in str(words)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words", "reason"),
    [
        ("report", ["exit:0"], "ended with status 0, and no reward was reported"),
        ("report", ["complain:a fault", "exit:2"], "ended with status 2: a fault, and no reward was reported"),
        ("report", ["fail"], "it gave up"),
        ("line", ["say:0.5", "exit:1"], "ended with status 1: 0.5"),
        ("line", ["exit:0"], "the last line that it printed, '', is no number from 0 to 1, and no JSON such as"),
        ("line", ["say:1.5"], "the last line that it printed, '1.5', is no number from 0 to 1"),
        ("line", ["say:nan"], "the last line that it printed, 'nan', is no number from 0 to 1"),
        ("exit", ["complain:dying", "kill"], "was ended by SIGKILL: dying"),
        ("line", ["say:1", "kill"], "was ended by SIGKILL: 1"),
    ],
)
async def test_what_is_no_reward_is_a_failure_and_never_0(url: str, way: Any, words: list[str], reason: str) -> None:
    began = time.monotonic()
    done = await work(url, "ask", *words, reward_source=way, options={"patience_s": 60.0})
    assert done.rewards == []
    assert reason in done.reasons[0]
    # Long before the run would give up the agent.
    assert time.monotonic() - began < 30


@pytest.mark.slow
async def test_a_second_command_reads_what_the_first_one_left(url: str) -> None:
    score = (sys.executable, "-c", "import os, pathlib; print(pathlib.Path(os.environ['AGENTR_OUTPUT']).read_text())")
    done = await work(url, "ask", "say:0.5", score_command=score)
    assert (done.error, done.rewards) == (None, [0.5])
    done = await work(url, "ask", "say:0.5", score_command=(sys.executable, "-c", "raise SystemExit('no such file')"))
    assert (done.rewards, len(done.reasons)) == ([], 1)
    assert "the score command ended with status 1: no such file" in done.reasons[0]


@pytest.mark.slow
async def test_a_copy_finds_its_episode_in_variables_placeholders_and_files(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "elsewhere")
    monkeypatch.setenv("CODEX_HOME", "mine")
    tasks = [{"prompt": "Süß?", "n": n} for n in range(3)]
    lines = "".join(json.dumps(task) + "\n" for task in tasks)
    tmp_path.joinpath("train.jsonl").write_text(lines, encoding="utf-8")
    words = ("{split}-{index}", "{task.prompt}", "{task.n}", "{{task}}", "${task}", '{a={"b"}}')
    options = {"splits": {"train": str(tmp_path / "train.jsonl"), "test": 1}}
    done = await work(
        url, "ask", "variables", "reward:1", "exit:0", *words, options=options, log_folder=tmp_path / "logs"
    )
    assert (done.error, done.rewards) == (None, [1.0])
    (log,) = tmp_path.joinpath("logs").iterdir()
    report = json.loads(log.read_text(encoding="utf-8"))
    id = report["AGENTR_EPISODE"]
    assert log.name == f"train-1-{id}.log"
    assert report["words"][4:] == ["train-1", "Süß?", "1", "{task}", "${task}", '{a={"b"}}']
    expected = {
        "OPENAI_BASE_URL": f"{url}/episodes/{id}/v1",
        "OPENAI_API_BASE": f"{url}/episodes/{id}/v1",
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": f"{url}/episodes/{id}",
        "ANTHROPIC_MODEL": "policy",
        "AGENTR_EPISODE_URL": f"{url}/episodes/{id}",
        "AGENTR_SPLIT": "train",
        "AGENTR_INDEX": "1",
        "AGENTR_TASK_FILE": f"{report['cwd']}/task.json",
        "AGENTR_FOLDER": report["cwd"],
        "CODEX_HOME": "mine",
        "NO_PROXY": "elsewhere,127.0.0.1",
        "PWD": report["cwd"],
        "PI_OFFLINE": "1",
    }
    assert {name: report[name] for name in expected} == expected
    assert report["OPENAI_API_KEY"] == report["ANTHROPIC_API_KEY"] == report["ANTHROPIC_AUTH_TOKEN"]
    assert json.loads(report["AGENTR_TASK"]) == tasks[1]
    assert not Path(report["cwd"]).exists()
    assert not Path(report["CLAUDE_CONFIG_DIR"]).exists()


@pytest.mark.slow
async def test_a_task_that_is_too_long_for_a_variable_is_in_its_file(url: str, tmp_path: Path) -> None:
    tmp_path.joinpath("train.jsonl").write_text(json.dumps({"text": "x" * 2**19}) + "\n", encoding="utf-8")
    options = {"index": 0, "splits": {"train": str(tmp_path / "train.jsonl"), "test": 1}}
    done = await work(url, "ask", "variables", "reward:1", options=options, log_folder=tmp_path / "logs")
    assert (done.error, done.rewards) == (None, [1.0])
    (log,) = tmp_path.joinpath("logs").iterdir()
    report = json.loads(log.read_text(encoding="utf-8"))
    assert (report["task"], "AGENTR_TASK" in report) == (2**19 + 12, False)
    done = await work(url, "{task}", options=options)
    assert "its task is too long for an argument, or cannot be one; use {task_file}" in done.reasons[0]


@pytest.mark.slow
async def test_copies_that_end_at_once_again_and_again_end_the_launcher(url: str) -> None:
    done = await work(url, "complain:no such module", "exit:3", episodes=12, options={"patience_s": 5.0})
    assert isinstance(done.error, ConfigError)
    assert str(done.error) == (
        "10 copies in a row ended before they asked the policy anything; the last one: ended with status 3: no such "
        "module, and no reward was reported"
    )
    # The other copy may report its own, too, before it is ended.
    assert 10 <= sum("no such module" in reason for reason in done.reasons) <= 11
    # One that asks begins the count anew.
    done = await work(url, "ask", "exit:3", episodes=12)
    assert done.error is None


@pytest.mark.slow
async def test_a_copy_that_takes_too_long_is_ended_with_all_that_it_started(url: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    done = await work(url, "ask", f"child:{file}", "sleep:600", time_limit_s=1.0)
    assert "it took more than 1 s" in done.reasons[0]
    assert not Path(f"/proc/{file.read_text()}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit:0", "kill"])
async def test_children_end_with_their_parent(url: str, tmp_path: Path, way: str) -> None:
    file = tmp_path / "pid"
    done = await work(url, "ask", f"child:{file}", "reward:1", way)
    assert done.rewards == [1.0]
    assert not Path(f"/proc/{file.read_text()}").exists()


@pytest.mark.slow
async def test_a_copy_whose_episode_is_over_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "_LEAVE_SECONDS", 0.1)
    done = await work(url, "ask", "reward:1", "sleep:600")
    assert done.rewards == [1.0]
    assert done.lines == ["0 at work; 1 episodes over: 1 rewarded"]
    done = await work(url, "ask", "sleep:600", options={"max_steps": 1, "patience_s": 1.0})
    assert done.lines == ["0 at work; 1 episodes over: 1 closed by their run"]


@pytest.mark.slow
async def test_output_without_end_is_read_and_not_kept(url: str, tmp_path: Path) -> None:
    done = await work(url, "ask", "flood", time_limit_s=2.0, log_folder=tmp_path)
    assert "it took more than 2 s" in done.reasons[0]
    (log,) = tmp_path.iterdir()
    assert 2**19 <= log.stat().st_size <= 2**20
    assert log.read_text().startswith("[what came before is left out]\n")
    assert done.lines[1] == f"  {log}"


@pytest.mark.slow
async def test_a_gateway_that_goes_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_PAUSE_SECONDS", 0.1)
    lines: list[str] = []
    with running(app()) as url:
        settings = Launch(command=(*AGENT, "ask", "reward:1"), num_copies=2)
        copies = Launcher(settings, url=url, token="", print_line=lines.append)
        task = asyncio.ensure_future(copies.run())
        assert (await offer_episode(url)).reward == 1
        while "1 rewarded" not in copies.summary():
            await asyncio.sleep(0.01)
    while not lines:
        await asyncio.sleep(0.01)
    with running(app(), port=int(url.rpartition(":")[2])):
        assert (await offer_episode(url)).reward == 1
        while not copies.summary().startswith("0 at work"):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))
    assert lines[0].startswith(f"the gateway at {url} cannot be reached (")
    assert lines[1:] == [f"the gateway at {url} is back", "0 at work; 2 episodes over: 2 rewarded"]


@pytest.mark.slow
async def test_two_launchers_share_a_gateway(url: str) -> None:
    first, second = await asyncio.gather(*(work(url, "ask", "reward:1", episodes=4) for _ in range(2)))
    assert first.rewards + second.rewards == [1.0] * 8
    assert sum(int(done.lines[-1].split()[3]) for done in (first, second)) == 8


async def test_an_address_without_a_gateway_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0.0)
    nothing = Launcher(Launch(command=AGENT, num_copies=1), url="http://127.0.0.1:9", token="", print_line=print)
    with pytest.raises(EnvironmentServerError, match=r"cannot be reached .*`agentr gateway` starts one"):
        await nothing.run()
    with running(app("secret")) as url:
        intruder = Launcher(Launch(command=AGENT, num_copies=1), url=url, token="wrong", print_line=print)
        with pytest.raises(EnvironmentServerError, match=r"answered 401 .* or it wants another token"):
            await intruder.run()


def test_a_command_is_checked_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("agent.py").touch()
    tmp_path.joinpath("test").mkdir()
    words = resolved_command(["python", "agent.py", "test", "--split=test", "./test", "no/such.py"])
    expected = ["python", str(tmp_path / "agent.py"), "test", "--split=test", str(tmp_path / "test"), "no/such.py"]
    assert list(words) == expected
    with pytest.raises(ConfigError, match="there is no program 'no-such-agent'; name one that can be run"):
        resolved_command(["no-such-agent"])
    for word in ("{url}", "x{split.a}"):
        with pytest.raises(ConfigError, match=r"is no placeholder of a command; there are task, .*write \{\{"):
            resolved_command(["python", word])


@pytest.mark.parametrize(
    "line", ["", "2", "-0.1", "nan", "inf", "true", "[1]", '"1"', "{}", '{"reward": true}', "[" * 9999]
)
def test_lines_that_say_no_reward(line: str) -> None:
    with pytest.raises(ValueError, match="is no number from 0 to 1"):
        read_reward(line)
    with pytest.raises(ValueError, match="a success that is not"):
        read_reward('{"reward": 1, "success": 1}')


@pytest.mark.slow
async def test_with_half_of_the_copies_killed_each_episode_ends_whole_or_as_a_failure(url: str) -> None:
    chance, met, pids = random.Random(5), set[int](), list[int]()

    async def kill() -> None:
        while True:
            await asyncio.sleep(0.01)
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    # Of a copy, its guard and the agent itself.
                    if process.pid not in met and small_agent.__file__ in process.cmdline():
                        met.add(process.pid)
                        if chance.random() < 0.3:
                            await asyncio.sleep(chance.random() * 0.2)
                            process.kill()
                            pids.append(process.pid)

    killer = asyncio.ensure_future(kill())
    words = ("ask", "sleep:0.05", "ask", "sleep:0.05", "ask", "reward:1")
    done = await work(url, *words, episodes=12, num_copies=4, options={"patience_s": 60.0})
    killer.cancel()
    whole = [each for each in done.episodes if isinstance(each, Trajectory)]
    assert [(len(each.steps), each.reward) for each in whole] == [(3, 1.0)] * len(whole)
    assert 0 < len(whole) < 12
    assert pids
    for reason in done.reasons:
        assert re.search(r"the agent gave it up: (was )?ended (by SIG(KILL|TERM)|with status)", reason), reason
