"""The vLLM adapter against a small real HTTP server that answers as vLLM does, and as it does when
it breaks.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from crowd import CROWD, crowd
from model_servers import launch

from agentr_core.errors import MalformedReply, ModelFault, ModelUnavailable, PromptTooLong, Transient
from agentr_core.models.connections import allow_connections
from agentr_core.models.vllm.model import VllmModel
from agentr_core.protocols import ChatModel, Starting
from agentr_core.types import Message, Request, Sampling


class Server:
    """Answers each request with the ids in `say`; a status other than 200 is answered with an
    error.

    A stream has an event a token, and begins with an empty one, as vLLM's does; at `pause_at`
    tokens it waits until it may go on, and a `stream_fault` then takes the place of the rest. While
    `hangs` it says nothing. `cut` is the part of an answer that it sends before it closes the
    connection, and `announced` whether it said how long the whole is.
    """

    def __init__(self, say: list[int]) -> None:
        self.say = say
        self.status = 200
        self.hangs = False
        self.cut = 1.0
        self.announced = True
        self.pause_at = -1
        self.stream_fault = False
        self.going_on, self.closing = threading.Event(), threading.Event()
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                if outer.hangs:
                    outer.closing.wait()
                    return
                if body.get("stream") and outer.status == 200:
                    # A client that has had enough closes the connection.
                    with suppress(ConnectionError):
                        self.stream(body)
                    return
                reply = {"text": "-", "finish_reason": "stop", "token_ids": outer.say, "logprobs": None}
                content = json.dumps(
                    {"choices": [{"index": number, **reply} for number in range(body["n"])]}
                    if outer.status == 200
                    else {"error": {"message": "out of order"}}
                ).encode()
                self.send_response(outer.status)
                if outer.announced:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: int(outer.cut * len(content))])

            def stream(self, asked: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.end_headers()
                last = len(outer.say) - 1
                self.event({"choices": [{"index": 0, "text": "", "token_ids": None, "finish_reason": None}]})
                for place, token in enumerate(outer.say[: round(outer.cut * (last + 1))]):
                    if place == outer.pause_at:
                        assert outer.going_on.wait(60)
                        if outer.stream_fault:
                            self.event({"error": {"message": "the engine is dead", "code": 500}})
                            return
                    logprobs = {"token_logprobs": [-place / 8]} if "logprobs" in asked else None
                    reason = "stop" if place == last else None
                    piece = {"index": 0, "text": "-", "token_ids": [token], "logprobs": logprobs}
                    self.event({"choices": [{**piece, "finish_reason": reason}]})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, value: dict[str, Any]) -> None:
                self.wfile.write(b"data: %b\n\n" % json.dumps(value).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self.going_on.set()
        self.http.shutdown()
        self.http.server_close()


class FixedFleet:
    """A fleet of servers that somebody else started; ready at the second look."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.looks = 0
        self.suspects: list[str] = []
        self.closed = 0

    def poll_addresses(self) -> tuple[str, ...] | None:
        self.looks += 1
        return self.addresses if self.looks > 1 else None

    def report_failure(self, address: str) -> None:
        self.suspects.append(address)

    def close(self) -> None:
        self.closed += 1


def make_request(text: str = "get oak log", **options: Any) -> Request:
    fields: dict[str, Any] = {"seed": 1, "n": 2, "sampling": Sampling(max_new_tokens=600, stop=(" END",))}
    return Request(messages=(Message(role="user", text=text),), **(fields | options))


@pytest.fixture
def servers(tiny_model_dir: Path) -> Iterator[list[Server]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = [*tokenizer("craft table END more")["input_ids"], tokenizer.eos_token_id]
    http_servers = [Server(ids), Server(ids)]
    yield http_servers
    for server in http_servers:
        server.close()


@pytest.fixture
def fleet(servers: list[Server]) -> FixedFleet:
    return FixedFleet(*(server.address for server in servers))


@pytest.fixture
async def model(tiny_model_dir: Path, fleet: FixedFleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmModel]:
    monkeypatch.setattr("agentr_core.models.vllm.model._POLL_SECONDS", 0.01)
    vllm_model = VllmModel(launch(tiny_model_dir), fleet)
    yield vllm_model
    await vllm_model.close()


async def test_it_keeps_both_protocols(model: VllmModel) -> None:
    assert isinstance(model, ChatModel)
    assert isinstance(model, Starting)


async def test_prompts_go_out_and_replies_come_back_as_ids(model: VllmModel, servers: list[Server]) -> None:
    request = make_request(session="tree 1")
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


@pytest.mark.slow
async def test_requests_of_a_session_go_to_one_replica(model: VllmModel, servers: list[Server]) -> None:
    session_of: dict[tuple[int, ...], str] = {}
    for turn in range(3):
        requests = [make_request(f"{number} {turn}", session=f"tree {number}") for number in range(12)]
        for request in requests:
            session_of[tuple(model.renderer.render_prompt(request.messages))] = str(request.session)
        await model.generate(requests)
    assert len(session_of) == 36, "each prompt tells its session"
    asked_of = [Counter(session_of[tuple(body["prompt"])] for body in server.bodies) for server in servers]
    assert sum(asked_of, Counter()) == {f"tree {number}": 3 for number in range(12)}
    assert not asked_of[0].keys() & asked_of[1].keys(), "no session was at two replicas"
    assert all(asked_of), "every replica has sessions"


@pytest.mark.slow
async def test_more_requests_are_under_way_than_a_client_allows_by_itself(
    tiny_model_dir: Path,
) -> None:
    reply = {"index": 0, "text": "-", "finish_reason": "stop", "token_ids": [2], "logprobs": None}
    async with crowd(CROWD, json.dumps({"choices": [reply]}).encode()) as server:
        model = VllmModel(launch(tiny_model_dir), FixedFleet(server.url))
        try:
            async with asyncio.timeout(600):
                replies = await model.generate([make_request(n=1, session="one")] * CROWD)
        finally:
            await model.close()
    assert len(replies) == CROWD == server.under_way


async def test_a_prompt_without_room_is_not_sent(model: VllmModel, servers: list[Server]) -> None:
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await model.generate([make_request(), make_request("craft " * 600)])
    assert not servers[0].bodies + servers[1].bodies


@pytest.mark.parametrize("status", [500, 503, 429, 404])
async def test_a_fault_of_the_replica_may_heal(
    model: VllmModel, servers: list[Server], fleet: FixedFleet, status: int
) -> None:
    for server in servers:
        server.status = status
    with pytest.raises(ModelUnavailable, match=f"answered {status}: .*out of order"):
        await model.generate([make_request()])
    assert len(fleet.suspects) == 1
    assert len(servers[0].bodies + servers[1].bodies) == 1, "retries are the caller's"


async def test_a_refused_request_does_not(model: VllmModel, servers: list[Server], fleet: FixedFleet) -> None:
    for server in servers:
        server.status = 400
    with pytest.raises(ModelFault, match="answered 400") as error:
        await model.generate([make_request()])
    assert not isinstance(error.value, ModelUnavailable)
    assert not fleet.suspects


async def test_a_replica_that_is_gone_may_come_back(model: VllmModel, servers: list[Server], fleet: FixedFleet) -> None:
    for server in servers:
        server.close()
    with pytest.raises(ModelUnavailable, match="does not answer"):
        await model.generate([make_request()])
    assert fleet.suspects


async def test_a_replica_that_hangs_is_given_up(tiny_model_dir: Path, servers: list[Server]) -> None:
    fleet = FixedFleet(servers[0].address)
    model = VllmModel(launch(tiny_model_dir, request_timeout=0.3), fleet)
    servers[0].hangs = True
    try:
        with pytest.raises(ModelUnavailable, match=r"does not answer \(ReadTimeout\)"):
            await model.generate([make_request()])
    finally:
        await model.close()
    assert len(servers[0].bodies) == 1, "it had the request"
    assert fleet.suspects == [servers[0].address]


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
async def test_an_answer_that_is_cut_is_no_reply(
    model: VllmModel, servers: list[Server], fleet: FixedFleet, part: float
) -> None:
    for server in servers:
        server.cut = part
    with pytest.raises(ModelUnavailable, match=r"does not answer .*peer closed connection"):
        await model.generate([make_request()])
    assert len(fleet.suspects) == 1


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
async def test_nor_is_one_that_ends_too_early_by_its_own_account(
    model: VllmModel, servers: list[Server], part: float
) -> None:
    for server in servers:
        server.cut, server.announced = part, False
    with pytest.raises(MalformedReply, match="malformed") as error:
        await model.generate([make_request()])
    assert isinstance(error.value, Transient)


async def test_a_reply_is_heard_as_it_is_sampled(model: VllmModel, servers: list[Server]) -> None:
    for server in servers:
        server.pause_at = len(server.say) - 2
    texts = list[str]()

    def hear(text: str) -> None:
        texts.append(text)
        if text.strip():
            for server in servers:
                server.going_on.set()

    sampling = Sampling(max_new_tokens=600, stop=(" END",), logprobs=True)
    ((reply,),) = await model.generate([make_request(n=1, sampling=sampling, on_text=hear)])
    whole = "craft table"
    assert reply.text == whole
    assert reply.token_ids == tuple(servers[0].say)
    assert reply.logprobs == tuple(-place / 8 for place in range(len(servers[0].say)))
    assert texts
    assert all(whole.startswith(text) for text in texts), "nothing that is taken back"
    for server in servers:
        server.pause_at = -1
    ((plain,),) = await model.generate([make_request(n=1)])
    assert (plain.text, plain.token_ids) == (reply.text, reply.token_ids)


async def test_several_replies_are_not_streamed(model: VllmModel, servers: list[Server]) -> None:
    await model.generate([make_request(n=2, on_text=lambda text: None)])
    (body,) = servers[0].bodies + servers[1].bodies
    assert "stream" not in body


@pytest.mark.parametrize("part", [0.0, 0.5])
async def test_a_stream_that_is_cut_is_no_reply(model: VllmModel, servers: list[Server], part: float) -> None:
    for server in servers:
        server.cut = part
    with pytest.raises(MalformedReply, match="is not whole") as error:
        await model.generate([make_request(n=1, on_text=lambda text: None)])
    assert isinstance(error.value, Transient)


async def test_a_replica_may_break_off_within_a_stream(
    model: VllmModel, servers: list[Server], fleet: FixedFleet
) -> None:
    for server in servers:
        server.pause_at, server.stream_fault = 1, True
        server.going_on.set()
    with pytest.raises(ModelUnavailable, match="broke off: the engine is dead"):
        await model.generate([make_request(n=1, on_text=lambda text: None)])
    assert len(fleet.suspects) == 1


async def test_a_stream_is_bounded_too(
    tiny_model_dir: Path, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentr_core.models.vllm.model.MIB", 1000)
    model = VllmModel(launch(tiny_model_dir, answer_mib=1), FixedFleet(servers[0].address))
    servers[0].say = servers[0].say * 40
    try:
        with pytest.raises(ModelFault, match=r"gives too large an answer: .* raise model\.vllm\.answer_mib"):
            await model.generate([make_request(n=1, on_text=lambda text: None)])
    finally:
        await model.close()


async def test_a_stream_of_no_json_is_malformed(tiny_model_dir: Path) -> None:
    async with crowd(1, b"data: {\n\n") as server:
        model = VllmModel(launch(tiny_model_dir), FixedFleet(server.url))
        try:
            with pytest.raises(MalformedReply, match="an event that is no JSON"):
                await model.generate([make_request(n=1, on_text=lambda text: None)])
        finally:
            await model.close()


def test_files_for_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        allow_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, hard), "enough as it is"
        allow_connections(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(1512, hard), hard)
        allow_connections(1 << 40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), "as far as the machine allows"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_a_start_can_be_interrupted(tiny_model_dir: Path) -> None:
    fleet = FixedFleet("http://127.0.0.1:9")
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
        await model.generate([make_request()])
