"""The vLLM adapter against a small real HTTP server that answers as vLLM does, and as it does when it breaks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from model_servers import launch

from agentr_core.errors import ModelFault, ModelUnavailable, PromptTooLong
from agentr_core.models.vllm import VllmModel
from agentr_core.protocols import ChatModel, Starting
from agentr_core.types import Message, Request, Sampling


class Server:
    """Answers each request with the ids in `say`; a status other than 200 is answered with an error."""

    def __init__(self, say: list[int]) -> None:
        self.say = say
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(asked)
                reply = {"text": "-", "finish_reason": "stop", "token_ids": outer.say, "logprobs": None}
                content = json.dumps(
                    {"choices": [{"index": number, **reply} for number in range(asked["n"])]}
                    if outer.status == 200
                    else {"error": {"message": "out of order"}}
                ).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Given:
    """A fleet of servers that somebody else started; ready at the second look."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.looks = 0
        self.suspects: list[str] = []
        self.closed = 0

    def advance(self) -> tuple[str, ...] | None:
        self.looks += 1
        return self.addresses if self.looks > 1 else None

    def suspect(self, address: str) -> None:
        self.suspects.append(address)

    def close(self) -> None:
        self.closed += 1


def asked(text: str = "get oak log", **options: Any) -> Request:
    fields: dict[str, Any] = {"seed": 1, "n": 2, "sampling": Sampling(max_new_tokens=600, stop=(" END",))}
    return Request(messages=(Message(role="user", text=text),), **(fields | options))


@pytest.fixture
def servers(tiny_model_dir: Path) -> Iterator[list[Server]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = [*tokenizer("craft table END more")["input_ids"], tokenizer.eos_token_id]
    made = [Server(ids), Server(ids)]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def fleet(servers: list[Server]) -> Given:
    return Given(*(server.address for server in servers))


@pytest.fixture
async def model(tiny_model_dir: Path, fleet: Given) -> AsyncIterator[VllmModel]:
    made = VllmModel(launch(tiny_model_dir), fleet)
    yield made
    await made.close()


async def test_it_keeps_both_protocols(model: VllmModel) -> None:
    assert isinstance(model, ChatModel)
    assert isinstance(model, Starting)


async def test_prompts_go_out_and_replies_come_back_as_ids(model: VllmModel, servers: list[Server]) -> None:
    request = asked(session="tree 1")
    ((first, second),) = await model.generate([request])
    assert first == second
    assert first.token_ids == tuple(servers[0].say)
    assert first.text == "craft table"
    assert first.finish_reason == "stop"
    assert first.completion_tokens == len(servers[0].say)
    assert first.prompt_tokens == model.count_tokens(request)
    (body,) = servers[0].bodies + servers[1].bodies
    assert body["prompt"] == model.renderer.render_prompt(request.messages)
    assert body["max_tokens"] == model.context_length - len(body["prompt"])
    assert model.renderer.end_of_turn in body["stop_token_ids"]


async def test_requests_of_a_session_go_to_one_replica(model: VllmModel, servers: list[Server]) -> None:
    for turn in range(3):
        await model.generate([asked(f"{number} {turn}", session=f"tree {number}") for number in range(12)])
    lengths = {len(server.bodies) for server in servers}
    assert all(length % 3 == 0 and length for length in lengths)
    firsts = [{tuple(body["prompt"][:4]) for body in server.bodies} for server in servers]
    assert sum(len(server.bodies) for server in servers) == 36
    assert firsts[0] | firsts[1]


async def test_a_prompt_without_room_is_not_sent(model: VllmModel, servers: list[Server]) -> None:
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await model.generate([asked(), asked("craft " * 600)])
    assert not servers[0].bodies + servers[1].bodies


@pytest.mark.parametrize("status", [500, 503, 429, 404])
async def test_a_fault_of_the_replica_may_heal(
    model: VllmModel, servers: list[Server], fleet: Given, status: int
) -> None:
    for server in servers:
        server.status = status
    with pytest.raises(ModelUnavailable, match=f"answered {status}: .*out of order"):
        await model.generate([asked()])
    assert len(fleet.suspects) == 1
    assert len(servers[0].bodies + servers[1].bodies) == 1, "retries are the caller's"


async def test_a_refused_request_does_not(model: VllmModel, servers: list[Server], fleet: Given) -> None:
    for server in servers:
        server.status = 400
    with pytest.raises(ModelFault, match="answered 400") as raised:
        await model.generate([asked()])
    assert not isinstance(raised.value, ModelUnavailable)
    assert not fleet.suspects


async def test_a_replica_that_is_gone_may_come_back(model: VllmModel, servers: list[Server], fleet: Given) -> None:
    for server in servers:
        server.close()
    with pytest.raises(ModelUnavailable, match="does not answer"):
        await model.generate([asked()])
    assert fleet.suspects


async def test_a_start_can_be_interrupted(tiny_model_dir: Path) -> None:
    fleet = Given("http://127.0.0.1:9")
    fleet.looks = -10_000
    model = VllmModel(launch(tiny_model_dir), fleet)
    waiting = asyncio.create_task(model.ready())
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await model.close()
    await model.close()
    assert fleet.closed
    with pytest.raises(ModelFault, match="is closed"):
        await model.generate([asked()])
