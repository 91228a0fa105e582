"""An ASGI application at a real port, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from agentr_core.http_server import server_config


@contextmanager
def running(app: ASGIApp, *, sockets: bool = False, port: int = 0) -> Iterator[str]:
    """Serve an application for the length of the block, with WebSockets if so told; lend its
    address.
    """
    with socket.create_server(("127.0.0.1", port)) as door:
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = server_config(
            app, websockets=sockets, log_level="critical", timeout_graceful_shutdown=1, loop="asyncio"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[door])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                threading.Event().wait(0.01)
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()
