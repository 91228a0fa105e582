"""Agents that misbehave at a real gateway: each is told what is wrong in the form of OpenAI's
errors, and costs no more than its own episode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from asgi import running
from outside import HELLO, Agent, asked, played, said, world

from agentr_core.environments.gateway import server
from agentr_core.environments.gateway.server import app
from agentr_core.errors import DataFault, EnvironmentServerError
from agentr_core.http_server import MAX_BODY_BYTES
from agentr_core.types import Message

TOKEN = "a token"


@pytest.fixture
def url() -> Iterator[str]:
    with running(app()) as address:
        yield address


def fault(answer: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer, which has OpenAI's fields and no others."""
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert isinstance(error["message"], str)
    assert error["type"] == ("server_error" if answer.status_code >= 500 else "invalid_request_error")
    return error


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [HELLO], **more}


FAULTY: list[tuple[str, Any, int, str, str | None]] = [
    ("chat/completions", b"", 400, "model: Field required", "model"),
    ("chat/completions", b"{", 400, "the body: Invalid JSON", None),
    ("chat/completions", b"\xff\xfe", 400, "the body: Invalid JSON", None),
    ("chat/completions", b"[" * 100_000, 400, "recursion limit", None),
    ("chat/completions", b"[]", 400, "the body: Input should be an object", None),
    ("chat/completions", b'{"model": "policy", "messages": "\\ud800"}', 400, "the body: Invalid JSON", None),
    ("chat/completions", chat(model=7), 400, "model: ", "model"),
    ("chat/completions", chat(messages=[]), 400, "messages: ", "messages"),
    ("chat/completions", chat(messages=[{"role": "king", "content": "?"}]), 400, "messages.0.role", "messages.0.role"),
    ("chat/completions", chat(messages=[HELLO, said("I begin")]), 400, "the last turn is the assistant's", None),
    ("chat/completions", chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400,
     "messages.0.content: a part of type 'image_url' is no text; the gateway takes text", "messages.0.content"),
    ("chat/completions", chat(n=2), 400, "n: Input should be 1", "n"),
    ("chat/completions", chat(tools=[{"type": "function"}]), 400, "Field required", "tools.0.function"),
    ("chat/completions", chat(tools=[{"type": "x", "function": {"name": "look"}}]), 400, "Input", "tools.0.type"),
    ("chat/completions", chat(tools=[{"type": "function", "function": {"name": ""}}]), 400, "needs a name",
     "tools.0.function"),
    ("chat/completions", b'{"model": "policy", "messages": [{"role": "user", "content": "?"}], "tools": [{"type": '
     b'"function", "function": {"name": "look", "parameters": NaN}}]}', 400, "tools: ", "tools"),
    ("chat/completions", b" " * (MAX_BODY_BYTES + 1), 413, f"a body has at most {MAX_BODY_BYTES} bytes", None),
    ("chat/completions", b" " * (MAX_BODY_BYTES * 20), 413, f"a body has at most {MAX_BODY_BYTES} bytes", None),
    ("completions", chat(), 404, "is not served here; agents have POST /episodes", None),
    ("responses", {"model": "policy"}, 400, "input: Field required", "input"),
    ("responses", {"model": "policy", "input": []}, 400, "there is no turn; end with one of the user", None),
    ("responses", {"model": "policy", "input": [{"type": "item_reference", "id": "7"}]}, 400,
     "input.0: the gateway takes messages, function calls", "input.0"),
    ("responses", {"model": "policy", "input": "On.", "previous_response_id": "resp_1"}, 400,
     "previous_response_id: nothing is stored here; send the whole conversation", "previous_response_id"),
    ("models", chat(), 405, "is not served here", None),
    ("../reward", {"reward": "1"}, 400, "reward: Input should be a valid number", "reward"),
    ("../reward", {"reward": True}, 400, "reward: Input should be a valid number", "reward"),
    ("../reward", b'{"reward": NaN}', 400, "reward: Input should be a finite number", "reward"),
    ("../reward", b'{"reward": Infinity}', 400, "reward: Input should be a finite number", "reward"),
    ("../reward", b'{"reward": 1' + b"0" * 6000 + b"}", 400, "the body: Invalid JSON", None),
    ("../reward", {"reward": 1.01}, 400, "reward: Input should be less than or equal to 1", "reward"),
    ("../reward", {"reward": -0.1}, 400, "reward: Input should be greater than or equal to 0", "reward"),
    ("../reward", {"reward": None}, 400, "reward: Input should be a valid number", "reward"),
    ("../reward", {"reward": [1]}, 400, "reward: Input should be a valid number", "reward"),
    ("../reward", {"reward": 1, "success": "yes"}, 400, "success: Input should be a valid boolean", "success"),
    ("../reward", {}, 400, "reward: Field required", "reward"),
    ("../failed", {"reason": 7}, 400, "reason: Input should be a valid string", "reason"),
]  # fmt: skip


async def test_each_faulty_request_is_told_its_reason_and_the_episode_goes_on(url: str) -> None:
    def play(agent: Agent) -> list[tuple[int, dict[str, Any]]]:
        answers = []
        with httpx.Client(base_url=agent.told["base_url"], timeout=60) as http:
            for path, body, *_ in FAULTY:
                content = body if isinstance(body, bytes) else json.dumps(body)
                answer = http.post(httpx.URL(agent.told["base_url"] + "/").join(path), content=content)
                answers.append((answer.status_code, fault(answer)))
        agent.says(HELLO)
        agent.end(reward=1)
        return answers

    trajectory, answers, _ = await played(url, play)
    for (path, body, status, part, field), (code, error) in zip(FAULTY, answers, strict=True):
        assert (code, error["param"]) == (status, field), (path, str(body)[:80], error)
        assert part in error["message"], (path, error)
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 1)


async def test_calls_and_rewards_that_come_too_late_are_told_so(url: str) -> None:
    def play(agent: Agent) -> list[Any]:
        agent.says(HELLO)
        agent.end(reward=0.5)
        responses = []
        with httpx.Client(base_url=url, timeout=60) as http:
            for episode in (agent.told["episode"], "elsewhere"):
                responses += [
                    http.post(f"/episodes/{episode}/v1/chat/completions", json=chat()),
                    http.post(f"/episodes/{episode}/reward", json={"reward": 0.5}),
                    http.post(f"/episodes/{episode}/failed", json={}),
                    http.get(f"/episodes/{episode}/v1/models"),
                ]
        return [(answer.status_code, fault(answer)["code"], fault(answer)["message"]) for answer in responses]

    trajectory, answers, _ = await played(url, play)
    assert trajectory.reward == 0.5
    errors = [(status, "episode_over") for status in (404, 410, 410, 410)]
    assert [answer[:2] for answer in answers] == errors + [(404, "episode_not_found")] * 4
    assert all("is over: its reward was reported; take another one" in message for _, _, message in answers[:4])
    assert all("episode elsewhere is not known here; take another one" in message for _, _, message in answers[4:])


async def test_every_other_answer_has_the_form_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answers = {
            404: await http.get("/nowhere"),
            405: await http.get("/episodes"),
            403: await http.post("/episodes", headers={"Origin": "http://elsewhere.example"}),
            400: await http.post("/run/next", json={}),
            503: await http.post("/run/next", json={"episode": "elsewhere"}),
        }
    for status, answer in answers.items():
        assert (answer.status_code, bool(fault(answer)["message"])) == (status, True)

    def broken(*_: Any) -> None:
        raise RuntimeError("two plus two is five")

    monkeypatch.setattr(server, "_model_description", broken)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        payload = (await http.post("/run/open", json={"environment": "gateway", "split": "train", "index": 0})).json()
        answer = await http.get(f"/episodes/{payload['episode']}/v1/models")
    assert answer.status_code == 500
    assert "RuntimeError: two plus two is five" in fault(answer)["message"]


async def test_a_conversation_that_the_model_cannot_read_is_refused_and_another_one_taken(url: str) -> None:
    """It was a fault of the run, and the agent was told that it had had all its steps."""

    def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if any(message.role == "tools" for message in messages):
            raise DataFault("the chat template does not tell the model of its tools")
        return f"reply {len(messages)}"

    def play(agent: Agent) -> Any:
        tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        reasons = []
        for history in ([HELLO], [HELLO], [HELLO, said("reply 1"), asked("On.")]):
            with pytest.raises(openai.BadRequestError) as error:
                agent.ask(*history, tools=tools)
            reasons.append(error.value.message)
            agent.says(*history)
        agent.end(reward=1)
        return reasons

    trajectory, reasons, _ = await played(url, play, reply=reply)
    assert all("the chat template does not tell the model of its tools" in reason for reason in reasons)
    assert [step.reply for step in trajectory.steps] == ["reply 1", "reply 1", "reply 3"]


async def test_a_fault_of_the_run_is_told_as_it_is(url: str) -> None:
    def broken(messages: tuple[Message, ...], seed: int, number: int) -> str:
        raise RuntimeError("two plus two is five")

    reasons = []

    def play(agent: Agent) -> None:
        with pytest.raises(openai.NotFoundError) as error:
            agent.says(HELLO)
        reasons.append(error.value.message)

    with pytest.raises(RuntimeError):
        await played(url, play, reply=broken)
    assert "is over: its run had a fault: RuntimeError: two plus two is five" in reasons[0]


async def test_a_token_is_asked_of_agents_and_runs() -> None:
    with running(app(TOKEN)) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": f"a={TOKEN}"}):
            async with httpx.AsyncClient(base_url=url, headers=headers) as http:
                for method, path in (("GET", "/"), ("POST", "/episodes"), ("POST", "/run/open"), ("GET", "/nowhere")):
                    answer = await http.request(method, path)
                    assert (answer.status_code, fault(answer)["code"]) == (401, "invalid_api_key")
        with pytest.raises(EnvironmentServerError, match="AGENTR_GATEWAY_TOKEN"):
            world(url).reach()
        world(url, token=TOKEN).reach()
        trajectory, names, _ = await played(url, model_names, token=TOKEN)
        assert (names, trajectory.reward) == (["policy"], 1.0)
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.post(f"/episodes?token={TOKEN}", json={"wait": 0})).status_code == 204


def model_names(agent: Agent) -> list[str]:
    names = [model.id for model in agent.client.models.list()]
    assert [agent.client.models.retrieve(name).id for name in ("policy", "small/one")] == ["policy", "small/one"]
    agent.says(HELLO)
    agent.end(reward=1)
    return names
