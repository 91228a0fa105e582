"""Each dialect on a real gateway: streams that bring text as it is sampled or are cut, faults that
end its clients at once, and keys.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from asgi import running
from outside import HELLO, Agent, played, world

from agentr_core.environments.gateway import server
from agentr_core.environments.gateway.server import app

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "policy", "messages": [HELLO]},
    "responses": {"model": "policy", "input": "Hello."},
    "messages": {"model": "policy", "max_tokens": 99, "messages": [HELLO]},
}
TOKEN = "a token"


@pytest.fixture
def url() -> Iterator[str]:
    with running(app()) as address:
        yield address


def content(path: str, answer: dict[str, Any]) -> Any:
    """Return the text of an answer."""
    if path == "responses":
        return answer["output"][0]["content"][0]["text"]
    return answer["choices"][0]["message"]["content"] if "choices" in answer else answer["content"][0]["text"]


def pieces(lines: Iterator[str]) -> Iterator[str]:
    """Yield the pieces of text in a stream of any dialect, and `wait` for each sign of life."""
    for line in lines:
        data = json.loads(line[6:]) if line.startswith("data: {") else {}
        if line.startswith(": ") or data.get("type") in ("ping", "response.in_progress"):
            yield "wait"
        elif data.get("choices") and data["choices"][0]["delta"].get("content"):
            yield data["choices"][0]["delta"]["content"]
        elif data.get("type") in ("response.output_text.delta", "content_block_delta"):
            yield data["delta"] if isinstance(data["delta"], str) else data["delta"]["text"]


@pytest.mark.parametrize("path", BODIES)
def test_text_arrives_as_it_is_sampled_with_signs_of_life_between(
    url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.0)
    monkeypatch.setattr(server, "_PING_SECONDS", 0.05)
    env = world(url)
    with ThreadPoolExecutor(1) as run, httpx.Client(base_url=url, timeout=60) as http:
        reset = run.submit(env.reset, env.instances("train")[0])
        base = http.post("/episodes").json()["base_url"]
        with http.stream("POST", f"{base}/{path}", json={**BODIES[path], "stream": True}) as answer:
            reset.result()
            texts = pieces(answer.iter_lines())
            assert next(texts) == "wait", "before any text"
            listener = env.listener()
            assert listener is not None
            listener("I lo")
            assert next(text for text in texts if text != "wait") == "I lo"
            listener("I look aro")
            assert next(text for text in texts if text != "wait") == "ok aro"
            step = run.submit(env.step, "I look around.")
            assert "".join(text for text in texts if text != "wait") == "und."
        http.post(f"{base.removesuffix('/v1')}/reward", json={"reward": 1})
        assert step.result().reward == 1
    env.close()


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_was_cut_is_answered_again_with_the_same_reply(
    url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.0)
    is_cut, numbers = threading.Event(), iter(range(10))

    def draw(*_: Any) -> str:
        assert is_cut.wait(60)
        return f"draw {next(numbers)}"

    def play(agent: Agent) -> list[Any]:
        with httpx.Client(base_url=agent.told["base_url"] + "/", timeout=60) as http:
            with http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
                assert next(answer.iter_lines())
            # The gateway reads on: what comes now comes after the end of that connection.
            http.get("models")
            is_cut.set()
            answers = [http.post(path, json=BODIES[path]).json() for _ in range(2)]
        agent.end(reward=1)
        return [content(path, answer) for answer in answers]

    trajectory, replies, _ = await played(url, play, reply=draw)
    assert replies == ["draw 0", "draw 1"] == [step.reply for step in trajectory.steps]


@pytest.mark.slow
async def test_an_episode_that_is_over_ends_the_clients_of_each_dialect(url: str) -> None:
    def play(agent: Agent) -> float:
        agent.says(HELLO)
        agent.end(reward=1)
        start = time.monotonic()
        patient = agent.client.with_options(max_retries=2)
        with pytest.raises(openai.NotFoundError, match="is over"):
            patient.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
        with pytest.raises(openai.BadRequestError, match="is over"):
            patient.responses.create(model="policy", input="?")
        with anthropic.Anthropic(base_url=agent.told["anthropic_url"], api_key="none") as client:
            for stream in (False, True):
                with pytest.raises(anthropic.APIStatusError, match="is over") as error:
                    client.messages.create(
                        model="policy", max_tokens=9, messages=[{"role": "user", "content": "?"}], stream=stream
                    )
                assert error.value.status_code == 410
        return time.monotonic() - start

    _, seconds, _ = await played(url, play)
    assert seconds < 10


@pytest.mark.parametrize("path", BODIES)
def test_a_fault_in_a_stream_is_the_end_of_it(url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.0)
    env = world(url)
    with ThreadPoolExecutor(1) as run, httpx.Client(base_url=url, timeout=60) as http:
        reset = run.submit(env.reset, env.instances("train")[0])
        base = http.post("/episodes").json()["base_url"]
        with http.stream("POST", f"{base}/{path}", json={**BODIES[path], "stream": True}) as answer:
            reset.result()
            lines = answer.iter_lines()
            next(lines)
            env.release("no more")
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    error = last["response"]["error"] if path == "responses" else last["error"]
    assert "is over: no more" in error["message"]
    assert {"responses": "response.failed", "messages": "error"}.get(path) == last.get("type")
    env.close()


def test_the_id_of_an_episode_is_a_key_to_it_and_to_no_other() -> None:
    with running(app(TOKEN)) as url, httpx.Client(base_url=url, timeout=60) as http:
        token = {"x-api-key": TOKEN}
        offer = {"environment": "gateway", "split": "train", "index": 0}
        keys = [http.post("/run/open", json=offer, headers=token).json()["episode"] for _ in range(2)]
        for header in ({"x-api-key": keys[0]}, {"Authorization": f"Bearer {keys[0]}"}):
            statuses = [
                http.get(path, headers=header).status_code
                for path in (f"/episodes/{keys[0]}/v1/models", "/v1/models", f"/episodes/{keys[1]}/v1/models", "/")
            ]
            assert statuses == [200, 200, 401, 401]
        unknown = http.post("/v1/messages", json=BODIES["messages"], headers={"x-api-key": "elsewhere"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")


async def test_models_are_listed_and_tokens_counted_for_the_clients_of_messages(url: str) -> None:
    def play(agent: Agent) -> Any:
        with anthropic.Anthropic(base_url=agent.told["anthropic_url"], api_key="none") as client:
            names = [model.id for model in client.models.list()]
            body: dict[str, Any] = {"model": "policy", "messages": [HELLO]}
            before = client.messages.count_tokens(**body).input_tokens
            usage = client.messages.create(max_tokens=9, **body).usage.input_tokens
            after = client.messages.count_tokens(**body).input_tokens
        agent.end(reward=1)
        return names, before, usage, after

    _, (names, before, usage, after), _ = await played(url, play)
    assert (names, before, after) == (["policy"], 2, usage)
