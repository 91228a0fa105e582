"""Serving an ASGI application at an address, until interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from agentr_core.errors import ConfigError


def serve(app: ASGIApp, *, host: str, port: int, listening: Callable[[str], Any]) -> None:
    """Serve an application until interrupted.

    Args:
        port: 0 means any free port.
        listening: is called with the address, such as `http://127.0.0.1:36001`, once clients can
            connect.

    Raises `ConfigError` if it cannot listen on the address.
    """
    import uvicorn

    with _listen(host, port) as door:
        listening(f"http://{f'[{host}]' if ':' in host else host}:{door.getsockname()[1]}")
        # Longer than clients keep an idle connection, so that none is closed under a request.
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_keep_alive=75, timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[door])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=2048)
        # Accepted connections inherit it. Without it the body of each answer waits 40 ms for the
        # acknowledgement of its head.
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return door
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from error
