"""The contract row by row: literal exchanges, answers that break it, the server's side, and lists
of instances.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from toy import Line
from toy import instance as line_instance

from agentr_core.environments.agentgym import worlds
from agentr_core.environments.agentgym.client import Connection
from agentr_core.environments.agentgym.server import SlotPool, app, number_instances
from agentr_core.environments.agentgym.wire import WIRE_FORMATS, read_ids
from agentr_core.environments.graders import Pattern
from agentr_core.environments.remote import StepOutcome
from agentr_core.errors import ConfigError, DataFileError, MalformedAnswer
from agentr_core.types import Instance

LINES = {index: line_instance(index) for index in range(5)}


@pytest.mark.parametrize(
    ("world", "create", "reset", "step"),
    [
        ("textcraft", {}, {"id": 3, "data_idx": 7}, {"id": 3, "action": "a"}),
        ("sciworld", {}, {"id": 3, "data_idx": 7}, {"id": 3, "action": "a"}),
        ("webshop", {}, {"env_idx": 3, "session_id": 7}, {"env_idx": 3, "action": "a"}),
        ("alfworld", {}, {"id": 3, "game": 7, "world_type": "Text"}, {"id": 3, "action": "a"}),
        ("searchqa", {"id": 7}, {"env_idx": 3, "id": 7}, {"env_idx": 3, "action": "a"}),
        ("sqlgym", {}, {"env_idx": 3, "item_id": 7}, {"env_idx": 3, "action": "a"}),
        ("weather", {"id": 7}, {"env_idx": 3, "id": 7}, {"env_idx": 3, "action": "Action: a"}),
        ("maze", {}, {"id": 3, "game": 7}, {"id": 3, "action": "a"}),
        ("wordle", {}, {"id": 3, "seed": 7}, {"id": 3, "action": "a"}),
        ("webarena", {}, {"env_idx": 3, "idx": 7, "seed": 0}, {"env_idx": 3, "action": "```a```"}),
    ],
)
def test_requests(world: str, create: Any, reset: Any, step: Any) -> None:
    wire = WIRE_FORMATS[world]
    assert (wire.create_body(7), wire.reset_body(3, 7), wire.step_body(3, "a")) == (create, reset, step)


@pytest.mark.parametrize(
    ("world", "answer", "first"),
    [
        ("textcraft", {"id": 3, "observation": "Crafting commands:", "done": False, "reward": 0}, "Crafting commands:"),
        ("sciworld", {"task_description": "Boil.", "observation": "A hall.", "deleted": False}, "Boil.\nA hall."),
        ("webshop", ["WebShop [SEP] Search", None], "WebShop [SEP] Search"),
        (
            "alfworld",
            {"observation": "A room.", "available_actions": ["go", "look"]},
            "A room.\nAVAILABLE ACTIONS: go,look",
        ),
        ("weather", "Goal: rain?", "Goal: rain?"),
    ],
)
def test_first_observations(world: str, answer: Any, first: str) -> None:
    assert WIRE_FORMATS[world].read_first_observation(answer) == first


@pytest.mark.parametrize(
    ("world", "answer", "turn"),
    [
        ("textcraft", {"observation": "x", "reward": 1, "done": True}, StepOutcome("x", 1.0, True, False, True)),
        (
            "sciworld",
            {"observation": "x", "reward": 5, "score": 30, "done": False},
            StepOutcome("x", 0.3, False, False, False),
        ),
        ("sciworld", {"observation": "x", "score": -100, "done": True}, StepOutcome("x", -1.0, True, False, False)),
        ("sciworld", {"observation": "x", "score": 100, "done": True}, StepOutcome("x", 1.0, True, False, True)),
        (
            "webshop",
            {"state": "x", "reward": 0.75, "done": True, "info": None},
            StepOutcome("x", 0.75, True, False, False),
        ),
        (
            "babyai",
            {"observation": "x", "reward": 0.9, "score": 1.8, "done": True},
            StepOutcome("x", 0.9, True, False, True),
        ),
        (
            "babyai",
            {"observation": "x", "reward": 0.9, "score": 0.9, "done": False},
            StepOutcome("x", 0.9, False, False, False),
        ),
        ("weather", {"observation": "x", "reward": 1.0, "done": False}, StepOutcome("x", 1.0, False, False, True)),
        (
            "maze",
            {"observation": "Failure\n", "reward": -1.0, "done": True},
            StepOutcome("Failure\n", 0.0, True, False, False),
        ),
        (
            "maze",
            {"observation": "Success\n", "reward": 1.0, "done": True},
            StepOutcome("Success\n", 1.0, True, False, True),
        ),
        (
            "webarena",
            {"observation": "x", "reward": 0, "terminated": False, "truncated": True, "info": {}},
            StepOutcome("x", 0.0, False, True, False),
        ),
    ],
)
def test_steps(world: str, answer: Any, turn: StepOutcome) -> None:
    assert WIRE_FORMATS[world].read_step(answer) == turn


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"reward": 0, "done": False}, "'observation' is missing in"),
        ({"observation": 3, "reward": 0, "done": False}, "'observation' is 3, not a str"),
        ({"observation": "x", "reward": True, "done": False}, "'reward' is True, not a float"),
        ({"observation": "x", "reward": 0, "done": 0}, "'done' is 0, not a bool"),
        ({"observation": "x", "reward": -1, "done": False}, r"a reward of -1 is not in \[0, 1\]"),
        ("x" * 500, "'reward' is missing in 'x{100,}…"),
    ],
)
def test_answers_that_break_the_contract(answer: Any, said: str) -> None:
    with pytest.raises(MalformedAnswer, match=said):
        WIRE_FORMATS["textcraft"].read_step(answer)
    with pytest.raises(MalformedAnswer):
        WIRE_FORMATS["textcraft"].read_id({"id": "3"})
    with pytest.raises(MalformedAnswer):
        WIRE_FORMATS["webshop"].read_first_observation([])


@pytest.mark.parametrize(
    ("world", "reply", "action"),
    [
        ("SciWorld", "Thought: x\n\nAction:\nopen door", "open door"),
        ("WebShop", "Action: search[a]\nAction: click[b]", "click[b]"),
        ("AlfWorld", "go to desk 1", ""),
        ("Weather", 'Action: f with Action Input: {"a":\n 1}', 'f with Action Input: {"a":\n 1}'),
        ("SearchQA", "<search>a</search> then <answer>b</answer>.", "<answer>b</answer>"),
        ("SearchQA", "<answer>b</search>", ""),
        ("SqlGym", "Action: ```sql\nSELECT 1;\n```", "SELECT 1;"),
        ("Wordle", "Action: Crane", "c r a n e"),
        ("WebArena", "I shall ```click [3]```", "click [3]"),
        ("TextCraft", "Action: Get 2 Oak Logs!", "get 2 oak logs"),
    ],
)
def test_parsing(world: str, reply: str, action: str) -> None:
    kind = getattr(worlds, world)
    assert kind(url="http://127.0.0.1:9", train="600", test="601").parse(reply) == action


def test_the_questions_of_searchqa_are_its_servers() -> None:
    """Its seven test sets end before 51,713, and its training sets before 221,328."""
    ids = worlds.SearchQA(url="http://127.0.0.1:9").published_ids()
    assert (ids["test"][0], ids["test"][-1]) == (0, 51_712)
    assert (ids["train"][0], ids["train"][-1]) == (51_713, 221_327)


def test_the_goal_of_the_maze_is_no_start() -> None:
    kind = worlds.Maze
    assert len(kind(url="http://127.0.0.1:9", train="0-20", test="21-24").instances("test")) == 4
    with pytest.raises(ConfigError, match="option test has the number 25, which the server cannot begin; 0 to 24 can"):
        kind(url="http://127.0.0.1:9", train="0-20", test="21-25")
    with pytest.raises(MalformedAnswer, match=r"a reward of -1 is not in \[0, 1\]"):
        WIRE_FORMATS["maze"].read_step({"observation": "x", "reward": -1.0, "done": False})


def test_errors_come_in_the_style_of_the_family() -> None:
    with TestClient(app(Line, WIRE_FORMATS["textcraft"], LINES)) as client:
        assert client.get("/").text == "ok"
        refusal = client.post("/step", json={"id": 999, "action": "inventory"})
        assert (refusal.status_code, refusal.json()) == (200, {"error": "The id 999 is not valid."})
        assert client.post("/step", json={"id": "three"}).status_code == 422
        assert client.post("/close", json={"id": 999}).json() is False
        assert client.get("/observation").status_code == 422

        answer = client.post("/create", json={}).json()
        key = {"id": answer["id"]}
        assert answer["observation"].startswith("The goal is")
        assert client.post("/reset", json=key | {"data_idx": 77}).json() == {"error": "The data_idx 77 is not served."}
        assert client.post("/reset", json=key | {"data_idx": 1}).json()["observation"] == "The goal is 3 to the right."
        assert client.post("/step", json=key | {"action": "right"}).json()["observation"] == "You are at 1."
        assert client.get("/observation", params=key).json() == "You are at 1."
        assert client.get("/detail", params=key).json()["done"] is False
        assert client.post("/close", json=key).json() is True
        assert client.post("/close", json=key).json() is False
        assert client.post("/step", json=key | {"action": "right"}).json() == {
            "error": f"The id {answer['id']} is not valid."
        }

    with TestClient(app(Line, WIRE_FORMATS["webshop"], LINES)) as client:
        env_idx = client.post("/create").json()
        unready = client.post("/step", json={"env_idx": env_idx, "action": "look"})
        assert (unready.status_code, "was never reset" in unready.text) == (500, True)
        assert client.post("/reset", json={"env_idx": env_idx, "session_id": 0}).json()[1] is None
        step = client.post("/step", json={"env_idx": env_idx, "action": "look"}).json()
        assert step == {"state": "You are at 0.", "reward": 0.0, "done": False, "truncated": False, "info": None}


@pytest.mark.parametrize("path", ["/create", "/reset", "/step", "/close"])
@pytest.mark.parametrize(
    "body",
    [
        b"hello",
        b"{",
        b'{"id": ' + b"9" * 5000 + b', "action": "look"}',
        b'{"id": "' + b"9" * 5000 + b'", "action": "look"}',
        b'{"id": 1.5, "action": 3, "data_idx": 1e400}',
        b"\xff\xfe",
        b"[1]",
        b'{"id": "three"}',
    ],
)
def test_what_is_no_request_is_answered_as_such(path: str, body: bytes) -> None:
    with TestClient(app(Line, WIRE_FORMATS["textcraft"], LINES)) as client:
        response = client.post(path, content=body)
        if path == "/create" and response.status_code == 200:
            # It has no field that could be wrong.
            return
        assert response.status_code == 422
        assert response.json()["detail"][0]["msg"]
        assert len(response.content) < 1000


def test_ids_are_taken_as_strings_and_a_reset_needs_no_number() -> None:
    with TestClient(app(Line, WIRE_FORMATS["textcraft"], LINES)) as client:
        key = {"id": str(client.post("/create", json={}).json()["id"])}
        observations = [
            client.post("/reset", json=key | more).json()["observation"] for more in ({}, {"data_idx": None})
        ]
        assert observations == ["The goal is 2 to the right."] * 2
        assert (
            client.post("/reset", json=key | {"data_idx": "1"}).json()["observation"] == "The goal is 3 to the right."
        )
        assert client.post("/step", json=key | {"action": "right"}).json()["observation"] == "You are at 1."
        assert client.get("/observation", params=key).json() == "You are at 1."
        for wrong in ("9" * 5000, "three", ""):
            assert client.get("/observation", params={"id": wrong}).status_code == 422
        assert client.get("/detail", params={"id": -1}).json() == {"error": "The id -1 is not valid."}
        assert client.post("/close", json=key).json() is True
    with TestClient(app(Line, WIRE_FORMATS["weather"], LINES)) as client:
        env_idx = client.post("/create", json={"id": 3}).json()
        assert client.post("/reset", json={"env_idx": env_idx}).json() == "The goal is 5 to the right."
        assert client.post("/reset", json={"env_idx": env_idx, "id": 0}).json() == "The goal is 2 to the right."


def test_a_graded_world_is_served_with_the_reward_of_its_grader() -> None:
    class Graded(Line):
        grader = Pattern("^stop$", where="action")

    with TestClient(app(Graded, WIRE_FORMATS["textcraft"], LINES)) as client:
        key = client.post("/create", json={}).json()
        for actions, rewards in ((["right", "stop"], [0, 1]), (["right", "right"], [0, 0]), (["jump"], [-1])):
            client.post("/reset", json=key | {"data_idx": 0})
            steps = [client.post("/step", json=key | {"action": action}).json() for action in actions]
            assert [step["reward"] for step in steps] == rewards
            assert steps[-1]["done"]


def test_idle_environments_are_closed_and_ids_are_not_used_again() -> None:
    lines: list[Line] = []

    def make() -> Line:
        lines.append(Line())
        return lines[-1]

    pool = SlotPool(make, WIRE_FORMATS["sciworld"], LINES, idle_s=0)
    first, second = (pool.create({})["id"] for _ in range(2))

    assert [line.closed for line in lines] == [True, False]
    assert pool.ids() == [second] == [first + 1]
    pool.close_all()
    assert lines[1].closed


class Network(httpx.BaseTransport):
    """Carries a request to a server that answers 1, or meets `fault` on the way."""

    def __init__(self) -> None:
        self.fault: type[httpx.TransportError] | None = None
        self.tries = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.tries += 1
        if self.fault is not None:
            raise self.fault("on the way", request=request)
        return httpx.Response(200, json=1)


@pytest.mark.parametrize(
    ("fault", "tries"),
    [(httpx.ConnectTimeout, 1), (httpx.ReadTimeout, 1), (httpx.ConnectError, 3)],
    ids=["dropped", "hung", "refused"],
)
def test_only_a_server_that_costs_no_time_is_asked_for_every_close(
    fault: type[httpx.TransportError], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network()
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=network))
    server = Connection("http://10.0.0.1:1", timeout_s=1, patience_s=0)
    network.fault = fault
    for number in range(3):
        server.close("/close", {"id": number})
    assert network.tries == tries

    network.fault = None
    server.post("/create", {})
    server.close("/close", {"id": 3})
    assert network.tries == tries + 2


def test_numbers_are_indices_unless_two_splits_share_one() -> None:
    class Apart(Line):
        def splits(self) -> tuple[str, ...]:
            return ("train", "test")

        def instances(self, split: str) -> list[Instance]:
            return [Instance(environment="line", split=split, index=i) for i in ((3, 4) if split == "train" else (0,))]

    assert {number: each.split for number, each in number_instances(Apart(), ("train", "test")).items()} == {
        3: "train",
        4: "train",
        0: "test",
    }

    class Shared(Apart):
        def instances(self, split: str) -> list[Instance]:
            return [Instance(environment="line", split=split, index=i) for i in range(5)]

    assert list(number_instances(Shared(), ("train", "test"))) == list(range(10))
    assert list(number_instances(Shared(), ("train", "train"))) == list(range(5))


def test_lists_of_instances(tmp_path: Path) -> None:
    file = tmp_path / "webshop_test.json"
    file.write_text(json.dumps([{"item_id": "webshop_12", "conversations": None}, {"item_id": "webshop_3"}]))

    assert read_ids("0-2, 7", "x") == [0, 1, 2, 7]
    assert read_ids(str(file), "x") == [12, 3]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("5-2", ConfigError, "the range 5-2 runs backwards"),
        ("1-4,3", ConfigError, "the ranges 1-4,3 overlap"),
        ("nowhere.json", DataFileError, "neither ranges such as 0-99,120 nor a file that exists"),
        ("cut.json", DataFileError, "is not a data file of AgentGym"),
        ("twice.json", DataFileError, "must have each instance once"),
    ],
)
def test_lists_that_are_wrong(given: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('[{"item_id": "webshop_1"')
    (tmp_path / "twice.json").write_text('[{"item_id": "webshop_1"}, {"item_id": "webshop_1"}]')
    with pytest.raises(error, match=f"option train.*{said}"):
        read_ids(str(tmp_path / given) if given.endswith("json") else given, "w: option train")
