"""Worlds on real AgentGym servers of ours: the same transcripts, whatever breaks, and nothing left
open.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import Fault, answer, cut, hang
from servers import free_port
from starlette.types import Receive, Scope, Send
from toy import Line
from toy import instance as line_instance
from worlds import World, lost, served_world

from agentr_core.environments import registry
from agentr_core.environments.agentgym import worlds
from agentr_core.environments.agentgym.client import AgentGymWorld
from agentr_core.environments.agentgym.server import number_instances
from agentr_core.environments.agentgym.wire import WIRE_FORMATS
from agentr_core.environments.contract import check
from agentr_core.environments.crafting import textcraft
from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    MalformedAnswer,
    ReplayDiverged,
    Transient,
)
from agentr_core.types import Instance, Transition

LINES = {index: line_instance(index) for index in range(5)}
KINDS = {kind.name.removeprefix("agentgym-"): kind for kind in vars(worlds).values() if hasattr(kind, "wire")}
STEPS = ["right", "look", "left", "right", "right"]


@pytest.fixture
def line() -> Iterator[World]:
    """The number line in the contract of TextCraft."""
    with served_world(Line, WIRE_FORMATS["textcraft"], LINES) as world:
        yield world


def client(world: World, kind: type[AgentGymWorld] = worlds.TextCraft, **options: Any) -> AgentGymWorld:
    plain: dict[str, Any] = {"train": "0-3", "test": "4", "timeout_s": 30, "patience_s": 60}
    return kind(url=world.url, **(plain | options))


def begin(env: AgentGymWorld, index: int = 0) -> str:
    return env.reset(env.instances("train")[index])


def transcript(env: Any, instance: Instance, actions: list[str]) -> list[Any]:
    """Return the first observation and all of each transition but what native worlds say besides
    success.
    """
    entries: list[Any] = [env.reset(instance)]
    for action in actions:
        *rest, info = env.step(action)
        entries.append((*rest, info["success"]))
    return entries


def test_every_world_has_its_environment() -> None:
    assert set(KINDS) == set(WIRE_FORMATS)
    assert {f"agentgym-{name}" for name in WIRE_FORMATS} == {n for n in registry.names() if n.startswith("agentgym-")}


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_each_contract_carries_an_episode(name: str) -> None:
    expected = transcript(Line(), LINES[1], ["right", "look", "right", "right"])

    with served_world(Line, WIRE_FORMATS[name], LINES) as world:
        env = client(world, KINDS[name])
        for _ in range(2):
            assert transcript(env, env.instances("train")[1], ["right", "look", "right", "right"]) == expected
        env.close()
        env.close()

        # A server without a close keeps what it has; whoever comes next in this process gets it.
        assert len(world.open_ids()) == (0 if WIRE_FORMATS[name].has_close else 1)
        env = client(world, KINDS[name])
        assert transcript(env, env.instances("train")[1], ["right", "look", "right", "right"]) == expected
        env.close()
        assert len(world.bodies(f"{WIRE_FORMATS[name].prefix}/create")) == (2 if WIRE_FORMATS[name].has_close else 1)


def test_two_episodes_never_share_an_environment() -> None:
    """AgentGym's SQL server holds 8, and then creates none but gives one of these again."""
    with served_world(Line, WIRE_FORMATS["sqlgym"], LINES) as world:
        first, second = client(world, worlds.SqlGym), client(world, worlds.SqlGym, retries=0)
        begin(first, 2)
        (env_id,) = world.open_ids()
        world.faults["/create", 1] = answer(200, str(env_id).encode())
        pattern = (
            rf"/create gave environment {env_id}, in which another episode is under way; .* lower scale\.concurrency"
        )
        with pytest.raises(EnvironmentUnavailable, match=pattern):
            begin(second)
        begin(second)
        assert [env.step("right").observation for env in (first, second)] == ["You are at 1."] * 2

        first.close()
        third = client(world, worlds.SqlGym)
        begin(third, 1)
        assert third._remote_environment is not None
        assert third._remote_environment.env_id == env_id
        third.close()
        second.close()


def test_a_server_with_few_environments_keeps_them_after_a_fault() -> None:
    with served_world(Line, WIRE_FORMATS["sqlgym"], LINES) as world:
        env = client(world, worlds.SqlGym)
        world.faults["/step", 1] = answer(500, b"boom")
        assert transcript(env, env.instances("train")[2], STEPS) == transcript(Line(), LINES[2], STEPS)
        assert len(world.bodies("/create")) == 1
        env.close()

        # One that cannot be begun may be gone with an earlier process of the server.
        world.faults["/reset", len(world.bodies("/reset"))] = answer(500, b"Internal Server Error")
        env = client(world, worlds.SqlGym)
        begin(env)
        assert len(world.bodies("/create")) == 2
        env.close()


def test_a_disaster_of_sciworld_comes_through(line: World) -> None:
    with served_world(Line, WIRE_FORMATS["sciworld"], LINES) as world:
        env = client(world, worlds.SciWorld)
        begin(env)
        assert env.step("jump")[1:] == (-1.0, True, False, {"success": False})
        env.close()


def test_an_action_of_a_served_world_is_a_call_and_what_cannot_be_read_stays_here() -> None:
    with served_world(
        textcraft.TextCraft, WIRE_FORMATS["textcraft"], number_instances(textcraft.TextCraft(), ("test",))
    ) as world:
        env = registry.make("agentgym-textcraft", {"url": world.url, "train": "9", "test": "0-3"}, transcript="native")
        instance = env.instances("test")[0]
        replies = env.expert(instance) or ()
        assert all("<tool_call>" in reply for reply in replies)
        _, outcomes = play_replies(env, instance, ["<tool_call>[]</tool_call>", "I wait.", *replies])
        env.close()
    assert "could not be read" in outcomes[0].step.observation
    assert [outcome.step.valid for outcome in outcomes[:2]] == [False, False]
    assert outcomes[-1].step.success
    assert len(world.bodies("/step")) == len(replies)


def test_textcraft_over_http_is_textcraft_in_process() -> None:
    native = textcraft.TextCraft()
    with served_world(
        textcraft.TextCraft, WIRE_FORMATS["textcraft"], number_instances(native, ("train", "test", "rest"))
    ) as world:
        env = worlds.TextCraft(url=world.url)
        assert env.instruction == native.instruction
        for split, position in (("train", 0), ("train", 200), ("test", 50), ("rest", 3)):
            remote_instance, instance = env.instances(split)[position], native.instances(split)[position]
            replies = native.expert(instance) or ()
            assert env.expert(remote_instance) == replies
            assert env.depth(remote_instance) == native.depth(instance)
            actions = ["inventory", "get 0 nonsense", *(env.parse(reply) for reply in replies)]
            assert transcript(env, remote_instance, actions) == transcript(native, instance, actions)
        env.close()

        assert check(lambda: worlds.TextCraft(url=world.url), instances_per_split=2) == ()
        assert world.open_ids() == []


def test_a_split_that_is_named_twice_keeps_its_numbers() -> None:
    native = textcraft.TextCraft()
    assert number_instances(native, ("train", "train")) == number_instances(native, ("train",))


def test_two_hundred_environments_open_at_once_and_64_clients_stay_apart() -> None:
    native = textcraft.TextCraft()
    numbers = number_instances(native, ("train", "test", "rest"))

    def make_env() -> Any:
        return registry.make("textcraft", {})

    with served_world(make_env, WIRE_FORMATS["textcraft"], numbers) as world, httpx.Client(base_url=world.url) as http:
        http.post("/create", json={})
        start = time.process_time()
        env_ids = [http.post("/create", json={}).json()["id"] for _ in range(200)]
        assert time.process_time() - start < 3
        assert len(set(env_ids)) == 200
        for env_id in env_ids:
            http.post("/close", json={"id": env_id})

        def visit(number: int) -> None:
            env = worlds.TextCraft(url=world.url, timeout_s=60)
            remote_instance, instance = env.instances("train")[number], native.instances("train")[number]
            with httpx.Client(base_url=world.url, timeout=60) as session:
                first_observation = env.reset(remote_instance)
                assert first_observation == textcraft.TextCraft().reset(instance)
                assert env._remote_environment is not None
                key = {"id": env._remote_environment.env_id}
                for count in range(1, 4):
                    observation = env.step(f"get {count} oak logs").observation
                    assert session.get("/observation", params=key).json() == observation
                assert env.step("inventory").observation == "Inventory: [oak logs] (6) "
            env.close()

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(visit, range(64)))
        assert len(world.open_ids()) == 1


UNCLEAR: dict[str, Fault] = {
    "an error": answer(500, b"Internal Server Error"),
    "an error in words": answer(200, b'{"error": "it broke"}'),
    "nobody there": answer(503, b"try later"),
    "garbage": answer(200, b"<html>"),
    "another shape": answer(200, b"[1, 2]"),
    "a wrong reward": answer(200, b'{"observation": "x", "reward": 7, "done": false}'),
    "no number": answer(200, b'{"observation": "x", "reward": NaN, "done": false}'),
    "half an answer": cut(announced=True),
    "done, and not said": lost,
}


# A reset has no reward; and at a create, an answer of another form is that of another world.
AT_RESET = [fault for fault in UNCLEAR if fault not in ("a wrong reward", "no number")]
AT_CREATE = [fault for fault in AT_RESET if fault != "another shape"]


@pytest.mark.parametrize(
    ("at", "what"),
    [(("/step", number), fault) for number in (0, 3) for fault in UNCLEAR]
    + [(("/reset", 0), fault) for fault in AT_RESET]
    + [(("/create", 0), fault) for fault in AT_CREATE],
)
def test_an_episode_goes_on_after_a_fault(line: World, at: tuple[str, int], what: str) -> None:
    line.faults[at] = UNCLEAR[what]
    env = client(line)

    assert transcript(env, env.instances("train")[2], STEPS) == transcript(Line(), LINES[2], STEPS)

    assert no_step_is_sent_twice(line)
    env.close()
    # An id that a broken create never told nobody can close; it is closed when it was idle for
    # long.
    told_nobody = at[0] == "/create" and what in ("half an answer", "done, and not said")
    assert len(line.open_ids()) == told_nobody


def no_step_is_sent_twice(world: World) -> bool:
    """Return whether each environment was sent a beginning of the episode, each step of it once."""
    actions_by_id: dict[int, list[str]] = {}
    for body in world.bodies("/step"):
        actions_by_id.setdefault(body["id"], []).append(body["action"])
    return all(actions == STEPS[: len(actions)] for actions in actions_by_id.values())


def test_a_server_that_hangs_is_left(line: World) -> None:
    line.faults["/step", 1] = hang
    env = client(line, timeout_s=3)

    assert transcript(env, env.instances("train")[2], STEPS) == transcript(Line(), LINES[2], STEPS)

    assert no_step_is_sent_twice(line)
    env.close()
    assert line.open_ids() == []


@pytest.mark.parametrize(
    ("fault", "error", "transient"),
    [
        (answer(500, b"boom"), EnvironmentRefusal, False),
        (answer(200, b'{"error": "boom"}'), EnvironmentRefusal, False),
        (answer(502, b"boom"), EnvironmentUnavailable, True),
        (answer(200, b"boom"), MalformedAnswer, True),
    ],
)
def test_what_stays_broken_is_raised(line: World, fault: Fault, error: type[Exception], transient: bool) -> None:
    env = client(line, retries=1)
    begin(env)
    line.faults["/step", -1] = fault

    with pytest.raises(error, match=r"/step.*boom") as exc_info:
        env.step("right")

    assert isinstance(exc_info.value, Transient) is transient
    assert len({body["id"] for body in line.bodies("/step")}) == len(line.bodies("/step")) == 2
    env.close()
    assert line.open_ids() == []


def test_an_episode_outlives_its_server(line: World) -> None:
    env, second_env = client(line), client(line)
    begin(env, 2)
    begin(second_env, 1)
    env.step("right")
    before = set(line.open_ids())
    line.stop()
    back = threading.Timer(0.3, line.start)
    back.start()

    assert env.step("right").observation == "You are at 2."
    assert second_env.step("right").observation == "You are at 1."

    back.join()
    assert before.isdisjoint(line.open_ids())
    assert len(line.open_ids()) == 2
    env.close()
    second_env.close()
    assert line.open_ids() == []


def test_a_server_that_stays_away_is_told_in_one_sentence(line: World) -> None:
    env = client(line, patience_s=0, retries=0)
    line.stop()
    with pytest.raises(EnvironmentUnavailable, match=r"cannot be reached .*; start the server, or correct its address"):
        begin(env)
    env.close()
    line.start()


def test_two_clients_at_once_do_not_meet(line: World) -> None:
    envs = [client(line) for _ in range(2)]
    results: dict[int, Any] = {}
    barrier = threading.Barrier(2)

    def play_replies(number: int) -> None:
        env = envs[number]
        barrier.wait(timeout=300)
        results[number] = [transcript(env, env.instances("train")[number], ["right"] * (2 + number)) for _ in range(10)]

    threads = [threading.Thread(target=play_replies, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)

    for number in range(2):
        assert results[number] == [transcript(Line(), LINES[number], ["right"] * (2 + number))] * 10
    assert len(line.open_ids()) == 2
    for env in envs:
        env.close()
    assert line.open_ids() == []


def test_a_world_that_replays_differently_is_a_fault_that_does_not_heal() -> None:
    counter = iter(range(100))

    class Moody(Line):
        def __init__(self) -> None:
            super().__init__()
            self._mood = next(counter)

        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return transition._replace(observation=f"{transition.observation} Mood {self._mood}.")

    with served_world(Moody, WIRE_FORMATS["textcraft"], LINES) as world:
        env = client(world)
        begin(env)
        env.step("look")
        world.faults["/step", 1] = answer(500, b"")
        with pytest.raises(ReplayDiverged, match=r"step 0, 'look', gave .*Mood 0.*in a fresh environment .*Mood 1"):
            env.step("right")
        env.close()
        assert world.open_ids() == []


def test_an_environment_closed_under_a_call_is_released_when_the_call_ends(line: World) -> None:
    entry, go_on = threading.Event(), threading.Event()

    async def slow(faulty: Any, scope: Scope, receive: Receive, send: Send) -> None:
        entry.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await faulty.app(scope, receive, send)

    env = client(line)
    begin(env)
    line.faults["/step", 0] = slow
    stepping = threading.Thread(target=env.step, args=("right",))
    stepping.start()
    assert entry.wait(timeout=300)

    env.close()

    assert len(line.open_ids()) == 1
    go_on.set()
    stepping.join(timeout=300)
    assert line.open_ids() == []
    with pytest.raises(EnvironmentFault, match="is closed"):
        begin(env)


def test_a_server_of_another_world_is_told(line: World) -> None:
    for kind, pattern in (
        (
            worlds.WebShop,
            r"this is not an AgentGym server of agentgym-webshop: .*/create: the answer is {.*, not a int",
        ),
        (worlds.Maze, r"/maze/create answered 404 .* not an AgentGym server of that world; correct the address"),
    ):
        env = client(line, kind)
        with pytest.raises(EnvironmentServerError, match=pattern):
            begin(env)
        env.close()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda env: env.step("look"), "a step before the reset"),
        (lambda env: [begin(env), *(env.step("right") for _ in range(3))], "a step after the end"),
        (lambda env: env.snapshot(), "has no snapshots; a state is restored by replay"),
        (lambda env: env.restore(None), "has no snapshots"),
        (lambda env: env.reset(line_instance(0)), "agentgym-textcraft has no instance line/train/0"),
    ],
)
def test_misuse_is_a_fault(line: World, use: Callable[[AgentGymWorld], Any], said: str) -> None:
    env = client(line)
    with pytest.raises(EnvironmentFault, match=said):
        use(env)
    env.close()


def test_a_server_is_reached_or_it_is_told_which_one_and_how_it_is_had(line: World) -> None:
    client(line).reach()
    absent = f"http://127.0.0.1:{free_port()}"
    pattern = rf"agentgym-textcraft: {absent} cannot be reached .*; `agentr env serve textcraft` starts one"
    with pytest.raises(EnvironmentServerError, match=pattern):
        worlds.TextCraft(url=absent, patience_s=0).reach()


def test_a_server_with_unsorted_recipes_is_told_at_the_start() -> None:
    native = textcraft.TextCraft()
    numbers = number_instances(native, ("train", "test", "rest"))
    order = sorted(numbers)
    # A folder that lists its files in another order gives the goals other numbers; a few stay by
    # chance.
    elsewhere = {number: numbers[order[(place + 3) % len(order)]] for place, number in enumerate(order)}
    elsewhere[order[0]] = numbers[order[0]]
    with served_world(textcraft.TextCraft, WIRE_FORMATS["textcraft"], elsewhere) as world:
        env = worlds.TextCraft(url=world.url)
        pattern = r"^agentgym-textcraft: at http.* number \d+ has the goal 'craft .*' and should have .*recipe files"
        with pytest.raises(EnvironmentServerError, match=pattern):
            env.reach()
        with pytest.raises(EnvironmentServerError, match="number 33 has the goal"):
            env.reset(Instance(environment=env.name, split="train", index=33))
        env.close()
        assert world.open_ids() == []
    with served_world(textcraft.TextCraft, WIRE_FORMATS["textcraft"], numbers) as world:
        env = worlds.TextCraft(url=world.url)
        env.reach()
        env.close()
        assert world.open_ids() == []


def test_options_are_checked_before_anything_is_sent(tmp_path: Any) -> None:
    def refusal(kind: type[AgentGymWorld] = worlds.WebShop, **options: Any) -> str:
        with pytest.raises(ConfigError) as exc_info:
            kind(**({"url": "http://127.0.0.1:9"} | options))
        return str(exc_info.value)

    assert "set the option url, or the variable AGENTR_AGENTGYM_WEBSHOP" in refusal(url="")
    assert "`agentr env serve textcraft` starts one" in refusal(worlds.TextCraft, url="")
    assert "it must look like http://127.0.0.1:36001" in refusal(url="localhost")
    assert "timeout_s must be above 0" in refusal(timeout_s=0)
    assert "needs the options train and test" in refusal()
    assert "instance 3 is in both train and test (2 are)" in refusal(train="0-4", test="3-9")
    with pytest.raises(ConfigError, match="has no split 'dev'; it has train, test"):
        worlds.WebShop(url="http://127.0.0.1:9", test="0-9").instances("dev")
