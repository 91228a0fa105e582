"""Our worlds as OpenEnv's clients get them: the wire to the letter, the episodes as in the process,
one sentence for whatever else comes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from asgi import running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import free_port
from toy import Line
from toy import instance as line_instance
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from agentr_core.environment import Environment
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.openenv.client import OpenEnv
from agentr_core.environments.openenv.server import app
from agentr_core.environments.reasoning.world import Reasoning
from agentr_core.errors import EnvironmentFault
from agentr_core.types import Instance, Transition

LINES = {"train": [line_instance(index) for index in range(4)], "test": [line_instance(4)]}


@contextmanager
def serve(make: Callable[[], Environment] = Line, **settings: Any) -> Iterator[str]:
    with running(app(make, "line", LINES, **settings), sockets=True) as url:
        yield url


def ask(socket: Connection, kind: str, data: Any = None) -> dict[str, Any]:
    socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
    answer: dict[str, Any] = json.loads(socket.recv(timeout=60))
    return answer


def open_socket(url: str, query: str = "") -> Connection:
    return connect(f"{url.replace('http', 'ws')}/ws{query}", proxy=None)


def test_an_episode_on_the_wire() -> None:
    with serve() as url, open_socket(url) as socket:
        begun = ask(socket, "reset", {"split": "train", "index": 0, "episode_id": "e"})
        where = {"split": "train", "index": 0}
        text = {"text": "The goal is 2 to the right.", "instruction": "Walk right to the goal.", "step_limit": 10}
        assert begun == {
            "type": "observation",
            "data": {"observation": {**text, "metadata": where}, "reward": None, "done": False, "metadata": where},
        }
        assert ask(socket, "step", {"reply": "Action: right"})["data"] == {
            "observation": {"text": "You are at 1.", "success": False, "valid": True, "metadata": {}},
            "reward": 0.0,
            "done": False,
        }
        assert ask(socket, "state") == {"type": "state", "data": {"episode_id": "e", "step_count": 1}}
        last = ask(socket, "step", {"reply": "right"})["data"]
        assert (last["reward"], last["done"], last["observation"]["success"]) == (1.0, True, True)
        assert ask(socket, "step", {"reply": "right"})["data"] == {
            "message": "There is nothing to act in: the episode is over. Reset first.",
            "code": "EXECUTION_ERROR",
        }
        assert ask(socket, "mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})["data"]["result"] == {
            "tools": []
        }
        socket.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)
        assert socket.close_code == 1000


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        (["right", "right", "right"], [0, 0, 1]),
        (["right", "stop"], [0, 1 / 3]),
        (["right", "jump"], [0, 0]),
        (["look"] * 10, [0] * 10),
    ],
)
def test_rewards_sum_to_that_of_the_episode_which_ends_by_itself(actions: list[str], rewards: list[float]) -> None:
    with serve() as url, open_socket(url) as socket:
        ask(socket, "reset", {"seed": 5})
        answers = [ask(socket, "step", {"reply": f"Action: {action}"})["data"] for action in actions]
        assert [answer["reward"] for answer in answers] == rewards
        assert [answer["done"] for answer in answers] == [False] * (len(actions) - 1) + [True]


class Broken(Line):
    """Breaks at the action `stop`."""

    def step(self, action: str) -> Transition:
        if action == "stop":
            raise ZeroDivisionError("by zero")
        if action == "look":
            raise EnvironmentFault("The simulator is gone.")
        return super().step(action)


@pytest.mark.parametrize(
    ("action", "said"), [("stop", "The world broke: ZeroDivision"), ("look", "The simulator is g")]
)
def test_a_fault_is_an_error_and_the_episode_is_lost(action: str, said: str) -> None:
    with serve(Broken) as url, open_socket(url) as socket:
        ask(socket, "reset", {"seed": 0})
        answer = ask(socket, "step", {"reply": action})
        assert (answer["type"], answer["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert answer["data"]["message"].startswith(said)
        assert "the episode was lost" in ask(socket, "step", {"reply": "right"})["data"]["message"]
        assert ask(socket, "reset", {"seed": 0})["type"] == "observation"


def test_each_client_has_a_place_and_no_more_than_there_are() -> None:
    with serve(max_slots=2) as url, open_socket(url) as first:
        ask(first, "reset", {"seed": 0})
        with open_socket(url) as second, open_socket(url) as third:
            ask(second, "reset", {"seed": 1})
            assert [ask(first, "step", {"reply": "right"})["data"]["observation"]["text"] for _ in range(2)][-1] == (
                "You are at 2."
            )
            assert ask(second, "state")["data"]["step_count"] == 0
            error = json.loads(third.recv(timeout=60))["data"]
            assert (error["code"], error["active_sessions"], error["max_sessions"]) == ("CAPACITY_REACHED", 2, 2)
            with pytest.raises(ConnectionClosed):
                third.recv(timeout=60)
    with serve(idle_s=0.1) as url, open_socket(url) as socket:
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)
        assert socket.close_code == 1001


class Slow(Line):
    """Takes a while for each step, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking = True

    def step(self, action: str) -> Transition:
        time.sleep(1)
        return super().step(action)


def test_a_world_that_blocks_keeps_nobody_waiting() -> None:
    with serve(Slow) as url, ThreadPoolExecutor(10) as pool:

        def play(_: int) -> float:
            with open_socket(url) as socket:
                ask(socket, "reset", {"seed": 0})
                began = time.monotonic()
                ask(socket, "step", {"reply": "right"})
                return time.monotonic() - began

        # One after the other they would have waited for 55 seconds together.
        assert sum(pool.map(play, range(10))) < 40


def test_what_cannot_be_made_is_told_and_takes_no_place() -> None:
    def broken() -> Environment:
        raise EnvironmentFault("there is no simulator")

    with serve(broken, max_slots=1) as url:
        for _ in range(2):
            with open_socket(url) as socket:
                error = json.loads(socket.recv(timeout=60))["data"]
                assert error == {"code": "FACTORY_ERROR", "message": "The world cannot be made: there is no simulator."}


WRONG: Mapping[str, tuple[Any, str, str]] = {
    "no JSON": ("{", "INVALID_JSON", "A message must be JSON"),
    "another type": ({"type": "jump"}, "UNKNOWN_TYPE", "and not 'jump'"),
    "another key": ({"type": "reset", "id": 1}, "VALIDATION_ERROR", "and not 'id'"),
    "another argument": ({"type": "reset", "data": {"sede": 1}}, "VALIDATION_ERROR", "seed, split, index, episode_id"),
    "another split": ({"type": "reset", "data": {"split": "attic"}}, "VALIDATION_ERROR", "there are train, test"),
    "an index too high": ({"type": "reset", "data": {"index": 4}}, "VALIDATION_ERROR", "the indices 0 to 3, and not 4"),
    "a seed below 0": ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR", "a whole number of at least 0"),
    "a seed in words": ({"type": "reset", "data": {"seed": "7"}}, "VALIDATION_ERROR", "not '7'"),
    "no episode": ({"type": "step", "data": {"reply": "x"}}, "EXECUTION_ERROR", "no episode has begun. Reset first."),
    "no data": ({"type": "step"}, "VALIDATION_ERROR", "must be an object, not None"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_message_gets_a_sentence_and_the_connection_lives(what: str) -> None:
    message, code, part = WRONG[what]
    with serve() as url, open_socket(url) as socket:
        socket.send(message if isinstance(message, str) else json.dumps(message))
        answer = json.loads(socket.recv(timeout=60))
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert part in answer["data"]["message"]
        assert ask(socket, "reset", {"seed": 1})["type"] == "observation"
        error = ask(socket, "step", {"text": "right"})["data"]
        assert error["code"] == "VALIDATION_ERROR"
        assert ask(socket, "step", {"reply": "right"})["type"] == "observation"


def test_what_no_client_of_ours_sends_is_refused() -> None:
    with serve() as url:
        with open_socket(url) as socket:
            socket.send("[1]")
            assert json.loads(socket.recv(timeout=60))["data"]["code"] == "SESSION_ERROR"
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=60)
        with open_socket(url, "?session_id=x") as socket:
            assert json.loads(socket.recv(timeout=60))["data"]["code"] == "SESSION_ERROR"
        # A page of any site may open a WebSocket to this machine.
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"{url.replace('http', 'ws')}/ws", origin="http://elsewhere.example", proxy=None)  # type: ignore[arg-type]
        with open_socket(url) as socket:
            with suppress(ConnectionClosed):
                socket.send("x" * 2**21)
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=60)


def test_http_is_what_openenv_validates_and_lists_the_tasks() -> None:
    with serve() as url, httpx.Client(base_url=url) as http:
        assert http.get("/health").json() == {"status": "healthy"}
        assert http.get("/openapi.json").json()["info"]["version"].startswith("1.")
        assert {"/reset", "/step", "/state"} <= http.get("/openapi.json").json()["paths"].keys()
        assert {"name", "description"} <= http.get("/metadata").json().keys()
        assert http.get("/schema").json()["action"]["required"] == ["reply"]
        assert http.post("/mcp", json={}).json()["jsonrpc"] == "2.0"
        assert http.get("/list_environments").json() == ["line"]
        splits = [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]
        assert http.get("/LINE/splits").json() == splits
        assert http.post("/line/num_tasks", json={"split": "train"}).json() == {"num_tasks": 4}
        assert http.post("/line/task", json={"split": "test", "index": 0}).json()["task"]["split"] == "test"
        tasks = http.post("/line/task_range", json={"split": "train", "start": 1, "stop": 3}).json()["tasks"]
        assert [task["index"] for task in tasks] == [1, 2]
        assert http.post("/reset", json={"seed": 1}).json()["observation"]["step_limit"] == 10
        for path, body, status in (
            ("/line/task", {"split": "test", "index": 1}, 422),
            ("/line/num_tasks", {"split": "attic"}, 422),
            ("/attic/num_tasks", {"split": "train"}, 404),
            ("/step", {"action": {"reply": "right"}}, 500),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, list(answer.json())) == (status, ["detail"])


def episode(env: Environment, instance: Instance, actions: list[str]) -> list[Any]:
    outcomes: list[Any] = [env.reset(instance)]
    for action in actions:
        observation, reward, terminated, _, info = env.step(action)
        outcomes.append((observation, reward, terminated, info["success"], info.get("valid")))
    return outcomes


def test_episodes_of_textcraft_are_those_in_the_process() -> None:
    native = TextCraft()
    splits = {split: native.instances(split) for split in ("train", "test")}
    with running(app(TextCraft, "textcraft", splits), sockets=True) as url:
        env = OpenEnv(url=url, success="success", observation="{text}")
        assert not env.flaws()
        for split, position in (("train", 0), ("train", 200), ("test", 50)):
            native_instance, remote_instance = splits[split][position], env.instances(split)[position]
            actions = ["inventory", "get 0 nonsense", *map(native.parse, native.expert(native_instance) or ())]
            steps = episode(env, remote_instance, actions)
            assert [step[:4] for step in steps] == [step[:4] for step in episode(native, native_instance, actions)]
            assert steps[-1][1:4] == (1.0, True, True)
        env.close()


def test_a_graded_reward_is_that_of_the_last_step() -> None:
    world = Reasoning(questions=["numbers"])
    splits = {"train": world.instances("train"), "test": world.instances("test")}
    (gold, *_) = world.problem(splits["train"][0]).golds
    with running(app(lambda: Reasoning(questions=["numbers"]), "reasoning", splits), sockets=True) as url:
        for answer, reward in ((gold, 1.0), ("nothing", 0.0)):
            with open_socket(url) as socket:
                ask(socket, "reset", {"split": "train", "index": 0})
                result = ask(socket, "step", {"reply": f"<think>hm</think>\n<answer>\\boxed{{{answer}}}</answer>"})[
                    "data"
                ]
                assert (result["reward"], result["done"], result["observation"]["success"]) == (
                    reward,
                    True,
                    reward > 0,
                )


# Bad input.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["seed", "split", "index", "episode_id", "reply", "metadata", "x"])
DATA = JSON | st.dictionaries(NAMES, JSON | st.sampled_from(["train", "test", 0, 3, 4, 2**70]), max_size=3)
KINDS = st.sampled_from(["reset", "step", "state", "mcp", "observation", ""])
MESSAGES = st.builds(lambda kind, data: json.dumps({"type": kind, "data": data}), KINDS | st.text(max_size=5), DATA)
RAW = st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace").decode()) | JSON.map(json.dumps)
DEEP = st.sampled_from(
    ["[" * 100_000, '{"type": "reset", "data": {"seed": ' + "9" * 5000 + "}}", "\\ud800", '"\\ud800"']
)
POSTS = st.sampled_from(["/reset", "/step", "/mcp", "/line/num_tasks", "/line/task", "/line/tasks", "/line/task_range"])


def bear(url: str, messages: list[str], bodies: list[tuple[str, str]]) -> int:
    """Send everything on one connection, opened again where it is closed, and return the number of
    answers, each of which is what was asked for or a sentence.
    """
    answers = 0
    socket = open_socket(url)
    for message in messages:
        socket.send(message)
        reply = json.loads(socket.recv(timeout=60))
        answers += 1
        assert reply["type"] in ("error", "observation", "state", "mcp"), reply
        if reply["type"] == "error":
            sentence(reply["data"]["message"])
            if reply["data"]["code"] == "SESSION_ERROR":
                with pytest.raises(ConnectionClosed):
                    socket.recv(timeout=60)
                socket = open_socket(url)
    assert ask(socket, "reset", {"index": 0})["type"] == "observation"
    assert ask(socket, "step", {"reply": "right"})["data"]["observation"]["text"] == "You are at 1."
    socket.close()
    with httpx.Client(base_url=url, timeout=60) as http:
        for path, body in bodies:
            answer = http.post(path, content=body.encode("utf-8", "replace"))
            answers += 1
            if answer.status_code != 200:
                sentence(answer.json()["detail"])
    return answers


def sentence(text: str) -> None:
    assert "\n" not in text
    assert "Traceback" not in text
    assert "The world broke" not in text
    assert text.endswith(".")
    assert len(text) < 500


def fuzz(examples: int) -> int:
    """Return how many requests got an answer, of so many examples of about ten each."""
    answers = 0
    with serve() as url:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            st.lists(MESSAGES | RAW | DEEP, max_size=12), st.lists(st.tuples(POSTS, RAW | DEEP | DATA.map(json.dumps)))
        )
        def bears(messages: list[str], bodies: list[tuple[str, str]]) -> None:
            nonlocal answers
            answers += bear(url, messages, bodies)

        bears()
    return answers


@pytest.mark.slow
def test_bad_input_gets_one_sentence() -> None:
    assert fuzz(40) > 200


@pytest.mark.long
def test_ten_thousand_bad_requests_get_one_sentence_each() -> None:
    answers = 0
    while answers < 10_000:
        answers += fuzz(400)


# Kills.


@contextmanager
def textcraft(port: int) -> Iterator[subprocess.Popen[str]]:
    """Serve TextCraft in a process of its own."""
    words = [sys.executable, "-m", "flows.cli", "env", "serve", "textcraft", "--protocol", "openenv"]
    process = subprocess.Popen([*words, "--port", str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "is served at" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def play_with_kills(episodes: int, kills: int) -> tuple[int, int]:
    """Play episodes in four threads on a server that is killed so many times; return how many
    differ from those in the process, and how many steps there were.
    """
    port, native, steps, over = free_port(), TextCraft(), [0], threading.Event()
    splits = {split: native.instances(split) for split in ("train", "test")}
    done, lock = [0], threading.Lock()

    def play(number: int) -> bool:
        split = ("train", "test")[number % 2]
        position = number % len(splits[split])
        instance = splits[split][position]
        # The server ends an episode with its twentieth step, the process does not.
        actions = ["inventory", *map(native.parse, TextCraft().expert(instance) or ())][:19]
        world = OpenEnv(
            url=f"http://127.0.0.1:{port}", success="success", observation="{text}", patience_s=600, timeout_s=300
        )
        outcomes = episode(world, world.instances(split)[position], actions)
        world.close()
        with lock:
            done[0] += 1
            steps[0] += len(actions)
        return [step[:4] for step in outcomes] == [step[:4] for step in episode(TextCraft(), instance, actions)]

    def kill() -> None:
        for round_ in range(kills + 1):
            with textcraft(port) as process:
                goal = episodes * (round_ + 1) // (kills + 1)
                while done[0] < goal and not over.wait(0.01):
                    pass
                if round_ < kills:
                    process.send_signal(signal.SIGKILL)
                else:
                    over.wait()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            differing = sum(not same for same in pool.map(play, range(episodes)))
    finally:
        over.set()
        killer.join()
    return differing, steps[0]


@pytest.mark.slow
def test_no_episode_is_lost_or_changed_by_kills() -> None:
    assert play_with_kills(24, 2)[0] == 0


@pytest.mark.long
def test_a_thousand_episodes_and_ten_kills() -> None:
    differing, steps = play_with_kills(1000, 10)
    sys.stderr.write(f"1,000 episodes of {steps:,} steps, ten kills: {differing} differ\n")
    assert differing == 0


def test_the_command_serves_either_protocol() -> None:
    port = free_port()
    with textcraft(port), connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as socket:
        assert ask(socket, "reset", {"seed": 1})["data"]["observation"]["step_limit"] == 20
