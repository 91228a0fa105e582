"""The backend for OpenAI-compatible servers against a real one that fails on purpose."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import Fault, Served, altered, answer, cut, hang, refuse, serving

from agentr_core.errors import (
    AgentrError,
    ConfigError,
    EndpointError,
    MalformedReply,
    ModelFault,
    ModelUnavailable,
    PromptTooLong,
)
from agentr_core.models.connections import MIB
from agentr_core.models.openai.chat import Endpoint, OpenAIModel, make_endpoint, served_context_length
from agentr_core.models.samplers import DirectSampler
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ServerConfig
from agentr_core.types import Message, Request, Sampling

KEY = "sk-test-6f1c2"


def script(messages: tuple[Message, ...], seed: int, number: int) -> str:
    return f"{messages[-1].text}: word {seed % 1000} {number}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(lambda: ScriptedModel(script, name="script", context_length=64)) as service:
        yield service


@pytest.fixture(autouse=True)
def _calm(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with a server without faults, and waits no longer between tries than the
    server asks for.
    """
    server.forget()
    monkeypatch.setattr("agentr_core.models.openai.chat.random.random", lambda: 0.0)


@asynccontextmanager
async def connect_model(server: Served, *, context: int = 0, key: str = KEY, **options: Any) -> Any:
    config = ServerConfig(**{"model": "script", "max_retries": 2, "connect_seconds": 600.0, **options})
    endpoint = Endpoint(url=server.url, key=key)
    model = await asyncio.to_thread(OpenAIModel.connect, endpoint, config, context_length=context)
    try:
        yield model
    finally:
        await model.close()


def ask(text: str = "hi", *, n: int = 2, seed: int = 5, **sampling: Any) -> Request:
    options = {"max_new_tokens": 20} | sampling
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(**options), seed=seed, n=n)


def choice(**fields: Any) -> Fault:
    return altered(lambda data: data["choices"][0].update(fields))


HEALING: dict[str, tuple[Fault, type[AgentrError], str]] = {
    "408": (refuse(408), ModelUnavailable, "answered 408"),
    "409": (refuse(409), ModelUnavailable, "answered 409"),
    "429": (refuse(429, "slow down"), ModelUnavailable, "answered 429: .*slow down"),
    "500": (refuse(500), ModelUnavailable, "answered 500"),
    "503 in HTML": (answer(503, b"<html>busy</html>"), ModelUnavailable, "answered 503"),
    "cut": (cut(announced=True), ModelUnavailable, "cannot be reached"),
    "cut without a length": (cut(announced=False), MalformedReply, "malformed"),
    "not JSON": (answer(200, b"<html>welcome</html>"), MalformedReply, "malformed .*welcome"),
    "an error that says 200": (answer(200, b'{"error": {"message": "no"}}'), MalformedReply, "choices: Field required"),
    "fewer replies": (altered(lambda data: data["choices"].pop()), MalformedReply, "2 replies .* and 1 came"),
    "more replies": (
        altered(lambda data: data["choices"].append(data["choices"][0])), MalformedReply, "2 replies .* and 3 came",
    ),
    "empty": (choice(message={"content": ""}), MalformedReply, "reply 0 is empty"),
    "null": (choice(message={"content": None}), MalformedReply, "reply 0 is empty"),
    "unfinished": (choice(finish_reason=None), MalformedReply, "has no finish reason"),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
async def test_an_answer_that_is_too_large_is_not_read_to_its_end(server: Served, packed: bool) -> None:
    large = b" " * (MIB + 1)
    async with connect_model(server, answer_mib=1) as model:
        expected = await model.generate([ask()])
        server.faults.append(
            answer(200, gzip.compress(large), **{"content-encoding": "gzip"}) if packed else answer(200, large)
        )
        with pytest.raises(ModelFault, match=r"it has more than 1 MiB; raise server\.answer_mib"):
            await model.generate([ask()])
        assert await model.generate([ask()]) == expected


async def test_an_answer_that_cannot_be_unpacked_is_asked_for_again(server: Served) -> None:
    async with connect_model(server) as model:
        expected = await model.generate([ask()])
        server.faults += [answer(200, b"{}", **{"content-encoding": encoding}) for encoding in ("gzip", "zstd")]
        assert await model.generate([ask()]) == expected


@pytest.mark.parametrize("name", HEALING)
async def test_a_passing_fault_is_healed(server: Served, name: str) -> None:
    async with connect_model(server) as model:
        expected = await model.generate([ask()])
        server.bodies.clear()
        server.faults += [HEALING[name][0], HEALING[name][0]]
        assert await model.generate([ask()]) == expected
        assert len(server.bodies) == 3
        assert server.bodies[0] == server.bodies[1] == server.bodies[2]


@pytest.mark.parametrize("name", HEALING)
async def test_a_lasting_fault_becomes_an_error_and_never_a_reply(server: Served, name: str) -> None:
    fault, error, pattern = HEALING[name]
    async with connect_model(server) as model:
        server.faults += [fault] * 3
        with pytest.raises(error, match=f"(?s){pattern}.*; 3 tries in .*given up") as caught:
            await model.generate([ask()])
        assert type(caught.value) is error
        assert (len(server.bodies), server.faults) == (3, [])


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (refuse(400, "no such field"), ModelFault, "refused the request \\(400\\): .*no such field"),
        (refuse(422, "bad"), ModelFault, "refused the request \\(422\\)"),
        (refuse(401, f"wrong key {KEY}"), EndpointError, "refuses the key in OPENAI_API_KEY"),
        (refuse(403), EndpointError, "refuses the key"),
        (refuse(404, "gone"), EndpointError, "knows no model 'script'.*gone"),
        (refuse(429, "pay", "insufficient_quota"), EndpointError, "no credit left"),
        (choice(finish_reason="content_filter"), ModelFault, "withheld"),
        (choice(finish_reason="tool_calls"), ModelFault, "called a tool"),
    ],
)
async def test_what_will_not_heal_is_not_tried_again(
    server: Served, fault: Fault, error: type[AgentrError], said: str
) -> None:
    async with connect_model(server) as model:
        server.faults.append(fault)
        with pytest.raises(error, match=said) as caught:
            await model.generate([ask()])
        assert type(caught.value) is error
        assert len(server.bodies) == 1


async def test_a_server_that_hangs_is_left(server: Served) -> None:
    async with connect_model(server) as model:
        expected = await model.generate([ask()])
    async with connect_model(server, timeout_seconds=3.0, max_retries=5) as model:
        server.faults.append(hang)
        assert await model.generate([ask()]) == expected
    async with connect_model(server, timeout_seconds=0.3, max_retries=1) as model:
        server.faults += [hang, hang]
        with pytest.raises(ModelUnavailable, match=r"did not answer in time; .* server\.timeout_seconds \(0\.3\)"):
            await model.generate([ask()])


async def test_the_server_says_when_to_come_back(server: Served) -> None:
    async with connect_model(server, retry_seconds=600.0) as model:
        server.faults.append(refuse(429, retry_after="1"))
        start = time.monotonic()
        await model.generate([ask()])
        assert time.monotonic() - start >= 1
        server.faults.append(refuse(503, retry_after="3600"))
        with pytest.raises(ModelUnavailable, match=r"1 try in \d+ s, given up"):
            await model.generate([ask()])


async def test_connections_are_as_many_as_the_recipe_says(server: Served) -> None:
    """That a client really opens more than it does by itself is tested with vLLM's, in
    tests/core.
    """
    async with connect_model(server, concurrency=1500) as model:
        pool = model._client._client._transport._pool
        assert (pool._max_connections, pool._max_keepalive_connections) == (1500, 1500)
        assert model._client.timeout.pool is None
        await model.generate([ask()])


async def test_one_request_at_fault_does_not_touch_the_others(server: Served) -> None:
    async with connect_model(server) as model:
        relay = DirectSampler(model, concurrency=64)
        server.faults.append(refuse(400))
        answers = await asyncio.gather(*(relay.sample(ask(seed=s)) for s in range(20)), return_exceptions=True)
        assert sum(isinstance(a, ModelFault) for a in answers) == 1
        assert sum(isinstance(a, list) for a in answers) == 19
        assert len(server.bodies) == 20, "nothing is paid for twice"


async def test_a_server_that_is_started_again_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentr_core.models.openai.chat.random.random", lambda: 0.5)
    with serving(lambda: ScriptedModel(script, name="script")) as service:
        async with connect_model(service, concurrency=4, max_retries=30, retry_seconds=120.0) as model:
            relay = DirectSampler(model, concurrency=4)
            tasks = [asyncio.create_task(relay.sample(ask(seed=seed))) for seed in range(60)]
            while len(service.bodies) < 8:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(service.stop)
            assert not all(task.done() for task in tasks), "the server must be missed"
            await asyncio.sleep(0.5)
            await asyncio.to_thread(service.start)
            answers = await asyncio.gather(*tasks)
    assert [[g.text for g in a] for a in answers] == [[f"hi: word {s} 0", f"hi: word {s} 1"] for s in range(60)]


async def test_no_more_requests_are_under_way_than_the_recipe_allows(server: Served) -> None:
    async with connect_model(server, concurrency=3) as model:
        await asyncio.gather(*(model.generate([ask(seed=seed)]) for seed in range(30)))
        assert server.most <= 3
        assert len(server.bodies) == 30


async def test_a_cancelled_request_frees_its_place(server: Served) -> None:
    async with connect_model(server, concurrency=1) as model:
        server.faults.append(hang)
        stuck = asyncio.create_task(model.generate([ask()]))
        while not server.bodies:
            await asyncio.sleep(0.01)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert (await model.generate([ask()]))[0][0].text == "hi: word 5 0"


async def test_a_server_without_n_is_asked_once_for_each_reply(server: Served) -> None:
    async with connect_model(server, n_per_request=1) as model:
        (replies,) = await model.generate([ask(n=3)])
        assert [body["n"] for body in server.bodies] == [1, 1, 1]
        assert replies[0].text == "hi: word 5 0"
        assert len({g.text for g in replies}) == 3
        assert [g.text for g in (await model.generate([ask(n=2)]))[0]] == [g.text for g in replies[:2]]


async def test_a_request_carries_what_the_recipe_says(server: Served) -> None:
    async with connect_model(
        server, send_seed=False, max_tokens_field="max_completion_tokens", extra_body={"user": "u"}
    ) as m:
        await m.generate([ask(n=1, stop=("STOP",), temperature=0.5, top_p=0.9)])
    assert server.bodies == [
        {
            "model": "script", "messages": [{"role": "user", "content": "hi"}], "n": 1, "temperature": 0.5,
            "top_p": 0.9, "stop": ["STOP"], "max_completion_tokens": 20, "user": "u",
        }
    ]  # fmt: skip
    assert server.keys == [f"Bearer {KEY}"]


async def test_tokens_are_the_servers_count_without_token_ids(server: Served) -> None:
    async with connect_model(server) as model:
        ((first, second),) = await model.generate([ask(n=2)])
        assert first.prompt_tokens == second.prompt_tokens == 2
        assert first.completion_tokens + second.completion_tokens == 2 * 4
        assert (first.token_ids, first.logprobs) == ((), None)


async def test_an_estimate_errs_on_the_long_side_and_the_server_has_the_last_word(
    server: Served, tiny_model_dir: Path
) -> None:
    async with connect_model(server, context=100_000) as model:
        text = "craft four oak planks using one oak log " * 5
        assert len(text) / 4 < model.count_tokens(ask(text)) < len(text) / 2
        with pytest.raises(PromptTooLong, match="leaves no room for a reply at http"):
            await model.generate([ask("word " * 80)])
    async with connect_model(server, tokenizer=str(tiny_model_dir)) as model:
        assert model.count_tokens(ask()) == model.count_tokens(replace(ask(), n=7))
        with pytest.raises(PromptTooLong, match="in the context of 64 of script"):
            await model.generate([ask(text)])
    assert len(server.bodies) == 1


async def test_a_tokenizer_tells_whether_its_prompts_open_a_thought(
    server: Served, tiny_model_dir: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    template = copy / "chat_template.jinja"
    begins = "<|im_start|>assistant\n"
    template.write_text(template.read_text().replace(begins, f"{begins}<think>\n"))
    for folder, thinks in ((tiny_model_dir, False), (copy, True)):
        async with connect_model(server, tokenizer=str(folder)) as model:
            (replies,) = await model.generate([ask()])
            assert {reply.thinks for reply in replies} == {thinks}


async def test_replies_differ_by_what_decides_them(server: Served) -> None:
    async with connect_model(server) as first, connect_model(server, extra_body={"user": "x"}) as second:
        assert first.fingerprint != second.fingerprint
    async with connect_model(server, concurrency=7) as same:
        assert first.fingerprint == same.fingerprint
    assert first.context_length == 64


@pytest.mark.parametrize(
    "fault", [refuse(401, f"bad {KEY}"), refuse(400, KEY), refuse(500, KEY), answer(200, KEY.encode())]
)
async def test_the_key_is_in_no_error(server: Served, fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with connect_model(server, max_retries=0) as model:
        server.faults.append(fault)
        with pytest.raises(AgentrError) as caught:
            await model.generate([ask()])
    text = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(Endpoint(url=server.url, key=KEY))
    assert KEY not in text


# ---- what a user is told


@pytest.mark.parametrize("key", [KEY + "\n", f" {KEY}", "sk-ключ"])
def test_a_key_that_cannot_be_sent_is_refused_unspoken(key: str) -> None:
    with pytest.raises(EndpointError, match="export it again") as caught:
        Endpoint(url="http://localhost:1/v1", key=key)
    assert key.strip() not in str(caught.value)


def test_a_missing_variable_is_named() -> None:
    server = ServerConfig(model="m", base_url="http://localhost:1/v1", api_key_env="JUDGE_KEY")
    with pytest.raises(
        EndpointError, match=r"the environment variable JUDGE_KEY with the key for .* is not set; export"
    ):
        make_endpoint(server, {})
    assert make_endpoint(server, {"JUDGE_KEY": "k"}) == Endpoint(url="http://localhost:1/v1", key="k")
    with pytest.raises(EndpointError, match=r"model m has no address; .* variable JUDGE_URL"):
        make_endpoint(ServerConfig(model="m", base_url_env="JUDGE_URL"), {})
    free = ServerConfig(model="m", base_url_env="JUDGE_URL", api_key_env="")
    assert make_endpoint(free, {"JUDGE_URL": "http://h:1/v1/"}) == Endpoint(url="http://h:1/v1", key="")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h/v1", "http://", "http://h:99999/v1", "http://h:x/v1", "http://["]
)
def test_a_bad_address_is_named(url: str) -> None:
    with pytest.raises(EndpointError, match="must look like http://localhost:8000/v1"):
        Endpoint(url=url, key="")


def test_an_address_with_a_secret_is_refused_unspoken() -> None:
    for url in ("http://me:hunter2@h/v1", "https://h/v1?key=hunter2"):
        with pytest.raises(EndpointError, match="holds no user, password or query") as caught:
            Endpoint(url=url, key="")
        assert "hunter2" not in str(caught.value)
        with pytest.raises(EndpointError) as caught:
            make_endpoint(ServerConfig(model="m"), {"OPENAI_BASE_URL": url})
        assert "hunter2" not in str(caught.value)


def look_up_context(url: str, **options: Any) -> int:
    return served_context_length(Endpoint(url=url, key=KEY), ServerConfig(**{"model": "script", **options}), 0)


def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(
        ModelUnavailable, match=r"http://127\.0\.0\.1:9/v1 cannot be reached .*; start the server, or correct"
    ):
        look_up_context("http://127.0.0.1:9/v1")


def test_an_unknown_model_is_told_what_there_is(server: Served) -> None:
    assert look_up_context(server.url) == 64
    with pytest.raises(EndpointError, match=r"has no model 'nix'; it has script: set server\.model"):
        look_up_context(server.url, model="nix")


def listing(status: int, body: bytes) -> Callable[[], Iterator[str]]:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    def run() -> Iterator[str]:
        with HTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = Thread(target=http.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{http.server_port}/v1"
            http.shutdown()
            thread.join()

    return run


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (200, {"data": [{"id": "script"}]}, ConfigError, "does not say how long the context of script is"),
        (404, {"detail": "Not Found"}, ConfigError, "does not say how long the context of script is"),
        (200, {"models": []}, MalformedReply, "list of models is malformed"),
        (401, {"error": {"message": f"bad {KEY}"}}, EndpointError, "refuses the key in OPENAI_API_KEY"),
        (500, {}, ModelUnavailable, "answered 500"),
    ],
)
def test_a_server_that_does_not_say_what_it_has(
    status: int, body: dict[str, Any], error: type[AgentrError], said: str
) -> None:
    for url in listing(status, json.dumps(body).encode())():
        with pytest.raises(error, match=said) as caught:
            look_up_context(url)
        assert KEY not in str(caught.value)
        if error is ConfigError:
            config = ServerConfig(model="script")
            assert served_context_length(Endpoint(url=url, key=KEY), config, 4096) == 4096
