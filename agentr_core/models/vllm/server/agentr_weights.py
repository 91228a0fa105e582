"""Our addition to a replica: it answers only its owner, who may replace the weights in place.

The check comes before all routes of vLLM's server, so those of VLLM_SERVER_DEV_MODE, which need no
key, stay closed. A request says which weights it is for; a server with other weights, such as one
that was restarted, refuses it, and so never answers with old weights.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "AGENTR_SERVER_KEY"
"""The environment variable with the bearer key."""
VERSION_HEADER = "x-agentr-weights"
"""The header with the version of the weights that a request is for; empty for the initial
weights.
"""
WEIGHTS_PATH = "/agentr/weights"
WRONG_WEIGHTS_STATUS = 409

_PUBLIC_PATH = "/health"
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class Weights:
    """An ASGI middleware, which vLLM creates once, around its own application."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._key = os.environ[KEY_VARIABLE]
        self._version = ""
        self._is_asleep = False

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer a request of the owner about the weights, refuse one without the key or for other
        weights, and pass any other on to vLLM.
        """
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == _PUBLIC_PATH):
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["type"] != "http" or not secrets.compare_digest(
            headers.get("authorization", "").encode(), f"Bearer {self._key}".encode()
        ):
            return await _respond(send, 401, {"error": {"message": "this server answers the run that started it"}})
        if scope["path"] == WEIGHTS_PATH:
            if scope["method"] == "POST":
                return await self._handle_post(scope, receive, send)
            return await _respond(send, 200, {"version": self._version})
        version = headers.get(VERSION_HEADER, "")
        if version != self._version:
            fault = f"the weights here are {self._version!r}, not {version!r}"
            return await _respond(send, WRONG_WEIGHTS_STATUS, {"error": {"message": fault}})
        await self._app(scope, receive, send)

    async def _handle_post(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        try:
            content, has_more = b"", True
            while has_more:
                message = await receive()
                content += message.get("body", b"")
                has_more = message.get("more_body", False)
            body = json.loads(content)
            engine = scope["app"].state.engine_client
            if body.get("sleep"):
                if not self._is_asleep:
                    self._version = "none, since this server sleeps"
                    await engine.pause_generation(mode="wait", clear_cache=True)
                    # At level 1 it would keep a copy of the weights, which are replaced anyway.
                    await engine.sleep(level=2)
                    self._is_asleep = True
            else:
                folder, version = body["folder"], body["version"]
                # Until all steps have succeeded, the weights are neither the old nor the new ones.
                self._version = "none, since replacing them failed"
                if self._is_asleep:
                    await engine.wake_up(tags=["weights"])
                else:
                    await engine.pause_generation(mode="wait", clear_cache=True)
                await engine.collective_rpc(Worker.take_weights.__name__, kwargs={"folder": folder})
                if self._is_asleep:
                    # Only now, so that its memory was free for reading the new weights.
                    await engine.wake_up(tags=["kv_cache"])
                    self._is_asleep = False
                # The cache holds keys and values computed with the old weights.
                if not await engine.reset_prefix_cache():
                    raise RuntimeError("the prefix cache could not be emptied")
                await engine.update_weight_version(version)
                self._version = await engine.get_weight_version()
                await engine.resume_generation()
        except Exception as error:
            # Whatever the engine raises is reported to the owner, who gives up.
            return await _respond(send, 500, {"error": {"message": f"{type(error).__name__}: {error}"}})
        await _respond(send, 200, {"version": self._version})


class Worker:
    """A mixin that vLLM adds to the worker of each GPU, or of the CPU."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def take_weights(self, folder: str) -> None:
        """Load the weights in a folder into the running model."""
        self.reload_weights(weights_path=folder)
        for layer in self.model_runner.get_model().modules():
            # On a CPU each layer multiplies by a packed copy of its weights. That of an output
            # layer tied to the embedding is not remade with the embedding's, and would keep the old
            # weights.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)


async def _respond(send: _Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
