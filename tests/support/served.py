"""A real HTTP server on a chat model, in a thread of its own, that can be told to fail, and to stop
and come back.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from chat_server import chat_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentr_core.protocols import ChatModel

Fault = Callable[["Faulty", Scope, Receive, Send], Any]


class Faulty:
    """Passes requests for completions on to an application, but breaks as many as there are faults
    in `faults`.

    `bodies` are the requests it saw, `keys` their Authorization headers, `most` is how many were
    under way at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.faults: list[Fault] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most = 0
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await self.app(scope, receive, send)
            return
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        try:
            await self._complete(scope, receive, send)
        finally:
            self._under_way -= 1

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(json.loads(body))
        self.keys.append(dict(scope["headers"])[b"authorization"].decode())
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        fault = self.faults.pop(0) if self.faults else None
        await (fault(self, scope, again, send) if fault else self.app(scope, again, send))


async def hang(faulty: Faulty, scope: Scope, receive: Receive, send: Send) -> None:
    """Say nothing until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def answer(status: int, body: bytes, **headers: str) -> Fault:
    """Answer with this and nothing else."""

    async def fault(faulty: Faulty, scope: Scope, receive: Receive, send: Send) -> None:
        await _send(send, status, body, {"content-type": "application/json", **headers})

    return fault


def refuse(status: int, message: str = "not now", code: str = "", **headers: str) -> Fault:
    """Answer with an error as OpenAI words it."""
    return answer(status, json.dumps({"error": {"message": message, "code": code}}).encode(), **headers)


def altered(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """Give the real answer with something changed in it."""

    async def fault(faulty: Faulty, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = await _real(faulty, scope, receive)
        data = json.loads(body)
        change(data)
        await _send(send, status, json.dumps(data).encode(), {"content-type": "application/json"})

    return fault


def cut(*, announced: bool) -> Fault:
    """Send the first half of the real answer and break off; `announced` tells the client how long
    it should be.
    """

    async def fault(faulty: Faulty, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = await _real(faulty, scope, receive)
        length = {"content-length": str(len(body))} if announced else {"connection": "close"}
        await _start(send, status, {"content-type": "application/json", **length})
        await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": announced})
        if announced:
            # uvicorn closes the connection of an application that ends too early.
            raise ConnectionResetError("cut on purpose")

    return fault


class Served:
    """A running server. `faults` are met by the next requests in turn."""

    def __init__(self, make: Callable[[], ChatModel], *, max_batch: int = 32) -> None:
        self._make = make
        self._max_batch = max_batch
        self._port = 0
        self.faults: list[Fault] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http://127.0.0.1:{self._port}/v1"

    def forget(self) -> None:
        """Have no faults left and no memory of requests."""
        for memory in (self.faults, self.bodies, self.keys):
            memory.clear()
        self._app.most = 0

    @property
    def most(self) -> int:
        """The most requests that were under way at once since the start or `forget`."""
        return self._app.most

    def start(self) -> None:
        """Listen, on the same port as before if it did so before."""
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self._port))
        self._port = listening.getsockname()[1]
        self._app = Faulty(chat_app(self._make(), max_batch=self._max_batch))
        self._app.faults, self._app.bodies, self._app.keys = self.faults, self.bodies, self.keys
        config = uvicorn.Config(
            self._app,
            log_level="critical",
            timeout_graceful_shutdown=1,
            # Closed under a client that uses it just then, a connection costs a request more than
            # tests count.
            timeout_keep_alive=600,
            ws="none",
            loop="asyncio",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listening,))
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            threading.Event().wait(0.01)

    def _serve(self, listening: socket.socket) -> None:
        asyncio.run(self._server.serve(sockets=[listening]))

    def stop(self) -> None:
        """Break off what is under way and be gone."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


@contextmanager
def serving(make: Callable[[], ChatModel]) -> Iterator[Served]:
    """Serve the model that `make` makes for the length of the block; a restart makes it anew."""
    server = Served(make)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def _real(faulty: Faulty, scope: Scope, receive: Receive) -> tuple[int, bytes]:
    """Return status and body of what the application itself answers."""
    status, body = 0, b""

    async def keep(message: Message) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await faulty.app(scope, receive, keep)
    return status, body


async def _start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _send(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    await _start(send, status, {**headers, "content-length": str(len(body))})
    await send({"type": "http.response.body", "body": body})
