"""The commands `agentr env`: what a person sees of worlds, and a real server in a process of its
own.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from asgi import running
from chat_server import chat_app
from click.testing import CliRunner, Result
from readme import BLOCKS, COMMANDS
from wheel import launched, started
from worlds import served_world

from agentr_core.environments.agentgym.server import number_instances
from agentr_core.environments.agentgym.wire import WIRE_FORMATS
from agentr_core.environments.agentgym.worlds import TextCraft as Client
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.errors import ConfigError
from agentr_core.models.scripted import ScriptedModel
from flows.cli import cli

PLAYERS = """
import asyncio, sys
from agentr_core.environments.agentgym.worlds import TextCraft
from agentr_core.episodes.rollout import EnvironmentPool
from agentr_core.episodes.rollout import EpisodeTimer, call_env
from agentr_core.types import Instance

async def play(pool, number):
    async with pool.lend(Instance(environment=TextCraft.name, split="train", index=0)) as env:
        instance = env.instances("train")[number]
        await call_env(env, EpisodeTimer(), lambda: env.reset(instance))
        print("open", flush=True)
        while True:
            await call_env(env, EpisodeTimer(), lambda: env.step("inventory"))

async def main():
    pool = EnvironmentPool(lambda _: TextCraft(url=sys.argv[1]))
    await asyncio.gather(*(play(pool, number) for number in range(3)))

asyncio.run(main())
"""


def ask(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli, ["env", *words], input=typed, catch_exceptions=False)


@contextmanager
def textcraft_server(env: dict[str, str], *words: str) -> Iterator[str]:
    """Run `agentr env serve textcraft` on a free port for the length of the block; lend its
    address.
    """
    with started("env", "serve", "textcraft", "--port", "0", *words, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"textcraft is served at (http://127\.0\.0\.1:\d+): \d+ instances", line)
        assert match, line + (process.stderr.read() if process.stderr else "")
        yield match[1]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)


def test_two_hundred_environments_open_within_seconds(process_env: dict[str, str]) -> None:
    with textcraft_server(process_env) as url, httpx.Client(base_url=url, timeout=60) as http:
        http.post("/create", json={})
        began = time.perf_counter()
        ids = {http.post("/create", json={}).json()["id"] for _ in range(200)}
        assert time.perf_counter() - began < 10
        assert len(ids) == 200
        assert http.post("/step", content=b"no json").status_code == 422


def test_list_has_native_and_served_worlds() -> None:
    assert {"textcraft", "agentgym-sciworld", "gymnasium"} <= set(ask("list").output.split())


@pytest.mark.long
def test_doctor_has_a_line_for_each_world_and_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WIRE_FORMATS:
        monkeypatch.delenv(f"AGENTR_AGENTGYM_{name.upper()}", raising=False)

    result = ask("doctor", "--format", "json")
    by_name = {report["name"]: report for report in json.loads(result.output)}

    assert result.exit_code == 0
    for name in ("textcraft", "sciworld"):
        expected = {"ok": True, "status": "ok", "violations": []}
        assert expected.items() <= by_name[name].items()
        assert re.fullmatch(r"keeps the contract; \d+ pairs of equal state and action, .*", by_name[name]["detail"])
    for name in WIRE_FORMATS:
        assert by_name[f"agentgym-{name}"]["status"] == "missing"
        assert f"the variable AGENTR_AGENTGYM_{name.upper()}" in by_name[f"agentgym-{name}"]["detail"]
    todo_result = ask("doctor", "agentgym-todo")
    assert (todo_result.exit_code, todo_result.output.count("\n")) == (1, 1)
    assert todo_result.output.startswith("agentgym-todo: missing - agentgym-todo needs the address of a server")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("doctor", "nowhere"), "there is no environment 'nowhere'"),
        (("doctor", "-o", "url=x"), "options belong to one environment; name it"),
        (("doctor", "textcraft", "-o", "foo=1"), "environment textcraft has no option foo; it has"),
        (("doctor", "sciworld", "-o", "setting=foo"), "environment.options.setting: give agentgym or eto"),
        (("doctor", "webshop", "-o", "limit=-1"), "environment.options.limit must be a whole number of at least 0"),
        (("doctor", "textcraft", "-o", "expert"), "option 'expert' must look like name=value"),
        (("play", "textcraft", "-o", "url=x"), "environment textcraft has no option url"),
        (
            ("play", "textcraft", "--index", "9999"),
            "textcraft has no instance 9999 in split train; its first ones are 31",
        ),
        (("serve", "textcraft", "--split", "attic"), "textcraft has no split 'attic'"),
        (("serve", "textcraft", "--host", "203.0.113.1"), "cannot listen on 203.0.113.1:36001 .*; choose another"),
    ],
)
def test_a_wrong_word_is_told(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(*words)


def test_a_world_is_shown_with_splits_options_and_an_instance() -> None:
    output = ask("show", "textcraft").output
    world = TextCraft()
    for split in world.splits():
        assert f"  {split}: {len(world.instances(split)):,} instances\n" in output
    instance = world.instances("train")[0]
    assert f"an expert wins {instance.key} in {len(world.expert(instance) or ())} steps" in output
    assert all(f"  {line}" in output for line in world.reset(instance).splitlines() if line)
    for name in inspect.signature(TextCraft).parameters:
        assert f"\n  {name}" in output.split("\noptions")[1]


def test_a_person_plays_here_and_over_http(process_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    native = TextCraft()
    instance = native.instances("test")[0]
    actions = [native.parse(reply) for reply in native.expert(instance) or ()]
    words = ("--split", "test", "--index", str(instance.index))
    lines = "".join(f"{action}\n" for action in actions)

    native_result = ask("play", "textcraft", *words, typed=lines)
    with textcraft_server(process_env) as url:
        monkeypatch.setenv("AGENTR_AGENTGYM_TEXTCRAFT", url)
        server_result = ask("play", "agentgym-textcraft", *words, typed=lines)
        ask("play", "agentgym-textcraft", *words, typed="inventory\n\n")
        assert httpx.get(f"{url}/list_envs").json() == []

    assert native_result.output.endswith("The episode is over: reward 1, success.\n")
    assert server_result.output == native_result.output


def test_an_endless_split_is_not_counted_through_and_the_end_of_the_input_ends_an_episode() -> None:
    result = ask("play", "textcraft", "--split", "renamed", "--index", "309252671", typed="inventory")
    assert "Goal: craft" in result.output
    assert result.output.endswith("\nAction: \nYou ended the episode: reward 0, no success.\n")


@pytest.mark.slow
def test_a_shipped_model_is_watched_as_the_manual_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (command,) = (command for command in COMMANDS if command.startswith("agentr env play "))
    output = ask(*shlex.split(command)[2:]).output
    (example,) = (text for _, text in BLOCKS if text.startswith("textcraft/test/3, played by textcraft-tiny"))
    assert output.rpartition("; ")[0] == example.rpartition("; ")[0]
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.slow
def test_a_watcher_may_leave_at_any_time(process_env: dict[str, str]) -> None:
    model = ScriptedModel(lambda messages, seed, number: "Thought: hm\nAction: inventory", name="served")
    words = ("play", "textcraft", "--split", "test", "--model", "served", "--max-steps", "100000")
    with running(chat_app(model, max_batch=4)) as url:
        command = [sys.executable, "-m", "flows.cli", "env", *words, "--server", f"{url}/v1"]
        with launched(command, env=process_env) as watching:
            assert watching.stdout is not None
            assert any("step 3" in line for line in watching.stdout)
            watching.send_signal(signal.SIGINT)
            _, error = watching.communicate(timeout=300)
    assert (watching.returncode, error.split()) == (130, ["interrupted"])


def test_a_client_that_is_interrupted_leaves_nothing_open(process_env: dict[str, str]) -> None:
    numbers = number_instances(TextCraft(), ("train",))
    with served_world(TextCraft, WIRE_FORMATS["textcraft"], numbers) as world:
        with launched([sys.executable, "-c", PLAYERS, world.url], env=process_env) as players:
            assert players.stdout is not None
            assert [players.stdout.readline() for _ in range(3)] == ["open\n"] * 3
            assert len(world.open_ids()) == 3
            players.send_signal(signal.SIGINT)
            players.communicate(timeout=300)
            assert players.returncode != 0
        assert world.open_ids() == []


def test_variables_stand_in_for_options_left_out() -> None:
    from agentr_core.environments import registry

    variables = {"AGENTR_AGENTGYM_TEXTCRAFT": "nowhere"}
    with pytest.raises(ConfigError, match="'nowhere' is not an address"):
        registry.make("agentgym-textcraft", {}, variables)
    assert isinstance(registry.make("agentgym-textcraft", {"url": "http://127.0.0.1:9"}, variables), Client)
