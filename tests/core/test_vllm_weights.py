"""Weights that are replaced in a server: our middleware in a real HTTP server, in the place of
vLLM's engine one that notes what it is told.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from model_servers import launch
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentr_core.errors import ConfigError, ModelFault, ModelUnavailable
from agentr_core.models.vllm.model import VllmModel, check_replacement
from agentr_core.models.vllm.replicas import Adapter, Launch, environment_variables, replica_command
from agentr_core.models.vllm.server import agentr_weights
from agentr_core.protocols import Reloading, Sleeping
from agentr_core.types import Message, Request, Sampling

KEY = "a key"


class Engine:
    """Has the methods of vLLM's engine that replacing weights needs, and notes their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.version = "default"
        self.fault = ""
        self.clears = True

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        self.calls.append((method, Path(kwargs["folder"]).name))
        if self.fault:
            raise RuntimeError(self.fault)

    async def sleep(self, *, level: int) -> None:
        self.calls.append(("sleep", level))
        if self.fault:
            raise RuntimeError(self.fault)

    async def wake_up(self, *, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.clears

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version


class Replica:
    """A server with the middleware, which can be started anew at its port, as a replica that
    died.
    """

    def __init__(self, say: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(agentr_weights.KEY_VARIABLE, KEY)
        self.say = say
        self.port = 0
        self.start()

    def start(self) -> None:
        self.engine = Engine()
        app = Starlette(routes=[Route("/health", self.health), Route("/v1/completions", self.reply, methods=["POST"])])
        app.state.engine_client = self.engine
        app.add_middleware(agentr_weights.Weights)
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    async def health(self, request: HttpRequest) -> JSONResponse:
        return JSONResponse({})

    async def reply(self, request: HttpRequest) -> JSONResponse:
        reply = {"index": 0, "finish_reason": "stop", "token_ids": self.say, "logprobs": None}
        self.engine.calls.append("reply")
        return JSONResponse({"choices": [reply]})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self, path: str, *, method: str = "POST", **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, b"{}", headers)
            return connection.getresponse().status
        finally:
            connection.close()


class FixedReplicas:
    """A fleet of replicas that runs already."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = replicas
        self.suspects: list[str] = []

    def poll_addresses(self) -> tuple[str, ...]:
        return tuple(replica.address for replica in self.replicas)

    def report_failure(self, address: str) -> None:
        self.suspects.append(address)

    def close(self) -> None:
        pass


def make_request(text: str = "get oak log") -> Request:
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(max_new_tokens=9), seed=1)


def launch_with_key(path: Path, key: str = KEY) -> Launch:
    return dataclasses.replace(launch(path), key=key)


@pytest.fixture
def replicas(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replica]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    fleet = [Replica([*tokenizer("craft")["input_ids"], tokenizer.eos_token_id], monkeypatch) for _ in range(2)]
    yield fleet
    # A server looks ten times a second whether it shall exit: both at once.
    for replica in fleet:
        replica.server.should_exit = True
    for replica in fleet:
        replica.close()


@pytest.fixture
async def model(
    tiny_model_dir: Path, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VllmModel]:
    monkeypatch.setattr("agentr_core.models.vllm.model._POLL_SECONDS", 0.01)
    vllm_model = VllmModel(launch_with_key(tiny_model_dir), FixedReplicas(*replicas))
    yield vllm_model
    await vllm_model.close()


def weights(model_dir: Path, folder: Path) -> Path:
    """Return a file with other weights of a model, alone in its folder."""
    folder.mkdir(parents=True)
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: value + 1 for name, value in tensors.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


async def test_all_replicas_take_new_weights_before_the_next_reply(
    model: VllmModel, replicas: list[Replica], tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert isinstance(model, Reloading)
    await model.generate([make_request()])
    await model.reload(weights(tiny_model_dir, tmp_path / "step-1"))
    for replica in replicas:
        assert [call for call in replica.engine.calls if call != "reply"] == [
            ("pause", "wait", True),
            ("take_weights", "step-1"),
            "reset",
            "resume",
        ]
        assert replica.engine.version == "step-1 (1)"
    await model.generate([make_request(text) for text in "abcdefgh"])
    assert [replica.engine.calls[-1] for replica in replicas] == ["reply", "reply"]
    await model.reload(weights(tiny_model_dir, tmp_path / "step-2"))
    assert {replica.engine.version for replica in replicas} == {"step-2 (2)"}


async def test_a_replica_that_was_started_anew_answers_only_once_it_has_the_weights(
    tiny_model_dir: Path, replicas: list[Replica], tmp_path: Path
) -> None:
    replica = replicas[0]
    model = VllmModel(launch_with_key(tiny_model_dir), FixedReplicas(replica))
    try:
        await model.reload(weights(tiny_model_dir, tmp_path / "step-1"))
        replica.close()
        replica.start()
        with pytest.raises(ModelUnavailable, match=r"answered 409: .*the weights here are '', not 'step-1"):
            await model.generate([make_request()])
        assert "reply" not in replica.engine.calls, "the old weights said nothing"
        await model.generate([make_request()])
        assert replica.engine.calls[-1] == "reply"
        assert replica.engine.version == "step-1 (1)"
    finally:
        await model.close()


@pytest.mark.parametrize("fault", ["rpc", "cache"])
async def test_a_replica_that_fails_to_take_them_ends_the_run_and_says_nothing_more(
    model: VllmModel, replicas: list[Replica], tiny_model_dir: Path, tmp_path: Path, fault: str
) -> None:
    if fault == "rpc":
        replicas[1].engine.fault = "no room"
    else:
        replicas[1].engine.clears = False
    message = {"rpc": "RuntimeError: no room", "cache": "the prefix cache could not be emptied"}[fault]
    with pytest.raises(ModelFault, match=rf"{replicas[1].address} did not take the weights in .*{message}"):
        await model.reload(weights(tiny_model_dir, tmp_path / "step-1"))
    bearer = {"Authorization": f"Bearer {KEY}"}
    for version in ("", "step-1 (1)"):
        assert replicas[1].status("/v1/completions", **bearer, **{agentr_weights.VERSION_HEADER: version}) == 409


async def test_replicas_that_sleep_answer_again_with_the_next_weights(
    model: VllmModel, replicas: list[Replica], tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert isinstance(model, Sleeping)
    await model.generate([make_request()])
    await model.sleep()
    await model.sleep()
    for replica in replicas:
        assert replica.engine.calls[-2:] == [("pause", "wait", True), ("sleep", 2)], "once, however often it is told"
        for version in ("", "asleep (1)", "asleep (2)"):
            headers = {"Authorization": f"Bearer {KEY}", agentr_weights.VERSION_HEADER: version}
            assert replica.status("/v1/completions", **headers) == 409
    # One dies in its sleep.
    replicas[1].close()
    replicas[1].start()
    await model.reload(weights(tiny_model_dir, tmp_path / "step-1"))
    woken = [("wake", "weights"), ("take_weights", "step-1"), ("wake", "kv_cache"), "reset", "resume"]
    assert replicas[0].engine.calls[-5:] == woken
    assert replicas[1].engine.calls == [("pause", "wait", True), ("take_weights", "step-1"), "reset", "resume"]
    await model.generate([make_request(text) for text in "abcdefgh"])
    assert [replica.engine.calls[-1] for replica in replicas] == ["reply", "reply"]


async def test_a_replica_that_cannot_sleep_ends_the_run(model: VllmModel, replicas: list[Replica]) -> None:
    await model.generate([make_request()])
    replicas[0].engine.fault = "no allocator"
    with pytest.raises(ModelFault, match=rf"{replicas[0].address} does not sleep: .*RuntimeError: no allocator"):
        await model.sleep()


def test_a_server_sleeps_only_where_the_recipe_says_so_and_on_a_gpu(tmp_path: Path) -> None:
    ours = launch_with_key(tmp_path)
    asleep = dataclasses.replace(ours, device="cuda", settings=dataclasses.replace(ours.settings, sleep=True))
    assert "--enable-sleep-mode" in replica_command(Path("python"), asleep, 1)
    assert "--enable-sleep-mode" not in replica_command(Path("python"), dataclasses.replace(asleep, key=""), 1), (
        "SFT, judges"
    )
    assert "--enable-sleep-mode" not in replica_command(Path("python"), dataclasses.replace(ours, device="cuda"), 1)
    with pytest.raises(ConfigError, match=r"model\.vllm\.sleep: only on a GPU"):
        replica_command(Path("python"), dataclasses.replace(asleep, device="cpu"), 1)


async def test_only_the_owner_is_answered(replicas: list[Replica]) -> None:
    paths = ("/v1/completions", agentr_weights.WEIGHTS_PATH, "/collective_rpc")
    for headers in ({}, {"Authorization": "Bearer another"}):
        assert [replicas[0].status(path, **headers) for path in paths] == [401, 401, 401]
    assert replicas[0].status("/health", method="GET") == 200
    assert not replicas[0].engine.calls


def test_a_server_is_started_with_the_middleware_only_where_it_is_ours_alone(tmp_path: Path) -> None:
    ours, shared_launch = launch_with_key(tmp_path), launch_with_key(tmp_path, key="")
    words = replica_command(Path("python"), ours, 1)
    assert words[words.index("--middleware") + 1] == "agentr_weights.Weights"
    assert words[words.index("--worker-extension-cls") + 1] == "agentr_weights.Worker"
    assert not {"--middleware", "--worker-extension-cls"} & set(replica_command(Path("python"), shared_launch, 1))
    assert KEY not in " ".join(words), "others see command lines"
    assert KEY not in repr(ours)
    variables = environment_variables(ours, 0, {"PYTHONPATH": "/elsewhere"})
    assert variables[agentr_weights.KEY_VARIABLE] == KEY
    assert (Path(variables["PYTHONPATH"]) / "agentr_weights.py").is_file()
    assert "PYTHONPATH" not in environment_variables(shared_launch, 0, {"PYTHONPATH": "/elsewhere"})


async def test_what_is_shared_or_an_adapter_is_not_replaced(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = weights(tiny_model_dir, tmp_path / "step-1")
    adapter = Adapter(base=tiny_model_dir, max_rank=8)
    for launch_spec, message in (
        (launch_with_key(tiny_model_dir, key=""), "unset AGENTR_VLLM"),
        (dataclasses.replace(launch_with_key(tiny_model_dir), adapter=adapter), "begin with a merged model"),
    ):
        model = VllmModel(launch_spec, FixedReplicas())
        try:
            with pytest.raises(ConfigError, match=message):
                await model.reload(file)
        finally:
            await model.close()


def test_a_replacement_has_every_parameter_and_no_other(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = weights(tiny_model_dir, tmp_path / "step-1")
    check_replacement(file, tiny_model_dir)
    tensors = load_file(file)
    first, second, *_ = sorted(tensors)
    for number, replacement in enumerate(
        (
            {name: value for name, value in tensors.items() if name != first},
            tensors | {second: torch.zeros(3)},
            tensors | {"more": torch.zeros(3)},
        )
    ):
        folder = tmp_path / f"wrong-{number}"
        folder.mkdir()
        save_file(replacement, folder / "model.safetensors")
        with pytest.raises(ModelFault, match="are not those of"):
            check_replacement(folder / "model.safetensors", tiny_model_dir)
    shutil.copyfile(file, file.with_name("another.safetensors"))
    with pytest.raises(ModelFault, match="must be alone in its folder"):
        check_replacement(file, tiny_model_dir)


def test_a_file_without_the_tied_output_layer_is_whole(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    embedding = tensors.get("model.embed_tokens.weight")
    assert embedding is not None
    save_file(tensors | {"lm_head.weight": embedding.clone()}, model / "model.safetensors")
    folder = tmp_path / "step-1"
    folder.mkdir()
    save_file(
        {name: value for name, value in tensors.items() if name != "lm_head.weight"}, folder / "model.safetensors"
    )
    check_replacement(folder / "model.safetensors", model)
