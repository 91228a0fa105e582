"""A real HTTP server with AgentGym's contract, in a thread of its own, that can be told to fail and
to start anew.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from served import Fault
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentr_core.environment import Environment
from agentr_core.environments.agentgym.server import app
from agentr_core.environments.agentgym.wire import WireFormat
from agentr_core.types import Instance


class Breakable:
    """Passes requests on, but breaks those at a path that `faults` has something for: the n-th one,
    from 0.

    `seen` are the path and body of each POST. The attribute `app` is what faults of `served` pass
    requests on to.
    """

    def __init__(self, app: ASGIApp, faults: dict[tuple[str, int], Fault], seen: list[tuple[str, Any]]) -> None:
        self.app = app
        self._faults = faults
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = (await receive())["body"]
        path = scope["path"]
        number = sum(path == request_path for request_path, _ in self._seen)
        self._seen.append((path, json.loads(body)))
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        fault = self._faults.get((path, number)) or self._faults.get((path, -1))
        # The faults of `served` ask nothing of their first argument but its `app`.
        await (fault(self, scope, replay, send) if fault else self.app(scope, replay, send))  # type: ignore[arg-type]


class World:
    """A running server. `faults` maps (path, n) to what the n-th POST there meets; n = -1 is every
    one.
    """

    def __init__(self, make: Callable[[], Environment], wire: WireFormat, numbers: Mapping[int, Instance]) -> None:
        self._make_app: Callable[[], Any] = lambda: app(make, wire, numbers)
        self._prefix = wire.prefix
        self._port = 0
        self.faults: dict[tuple[str, int], Fault] = {}
        self.seen: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http://127.0.0.1:{self._port}"

    def open_ids(self) -> list[int]:
        """The environments that are open on the server."""
        ids: list[int] = httpx.get(f"{self.url}{self._prefix}/list_envs", timeout=60).json()
        return ids

    def bodies(self, path: str) -> list[Any]:
        """The bodies of the requests to a path."""
        return [body for request_path, body in self.seen if request_path == path]

    def start(self) -> None:
        """Listen with a new application, on the same port as before if it did so before."""
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(("127.0.0.1", self._port))
        self._port = listening.getsockname()[1]
        breakable = Breakable(self._make_app(), self.faults, self.seen)
        config = uvicorn.Config(breakable, log_level="critical", timeout_graceful_shutdown=1, ws="none", loop="asyncio")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[listening])))
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            threading.Event().wait(0.01)

    def stop(self) -> None:
        """Break off what is under way and be gone, with all environments."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@contextmanager
def served_world(make: Callable[[], Environment], wire: WireFormat, numbers: Mapping[int, Instance]) -> Iterator[World]:
    """Serve environments for the length of the block."""
    world = World(make, wire, numbers)
    world.start()
    try:
        yield world
    finally:
        world.stop()


async def lost(faulty: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Carry the request out and answer with an error, as if the server broke just after."""

    async def nowhere(message: Message) -> None:
        pass

    await faulty.app(scope, receive, nowhere)
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
