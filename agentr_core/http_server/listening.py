"""Serving an ASGI application at an address, until interrupted."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentr_core.errors import ConfigError

LOST: Final = "agentr.lost"
"""The key in the scope of a request under which an application may leave a function, which is
called if the answer cannot have reached the client, even after it was sent.
"""
STOPPING: Final = "agentr.stopping"
"""The same for a function that is called if the server is stopped before the answer is complete."""


class Watched(H11Protocol):
    """A connection that says which answers were lost, and when the server is stopped.

    ASGI tells of a client that left before its answer was complete. An answer is also lost if the
    client closes its end without reading it. The client's system then resets the connection.
    """

    def eof_received(self) -> None:
        """Note that the client sends nothing more; the connection is closed with that."""
        if self.cycle is not None and (not self.cycle.response_complete or self._is_reset()):
            self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        if self.cycle is not None and (exc is not None or not self.cycle.response_complete):
            self._lose()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection, after its answer if there is one under way."""
        stopping: Any = self.scope.get(STOPPING) if self.scope is not None else None
        if stopping is not None and not self.cycle.response_complete:
            stopping()
        super().shutdown()

    def _is_reset(self) -> bool:
        door = self.transport.get_extra_info("socket")
        return door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.EPIPE, errno.ECONNRESET)

    def _lose(self) -> None:
        lost: Any = self.scope.get(LOST)
        if lost is not None:
            lost()


def serve(app: ASGIApp, *, host: str, port: int, listening: Callable[[str], Any]) -> None:
    """Serve an application until interrupted.

    Args:
        port: 0 means any free port.
        listening: is called with the address, such as `http://127.0.0.1:36001`, once clients can
            connect.

    Raises `ConfigError` if it cannot listen on the address.
    """
    with _listen(host, port) as door:
        listening(f"http://{f'[{host}]' if ':' in host else host}:{door.getsockname()[1]}")
        uvicorn.Server(configured(app, log_level="warning", timeout_graceful_shutdown=5)).run(sockets=[door])


def configured(app: ASGIApp, **settings: Any) -> uvicorn.Config:
    """Return the configuration with which applications are served."""
    # The connection is kept for longer than clients keep an idle one, so that none is closed under
    # a request.
    return uvicorn.Config(app, http=Watched, ws="none", timeout_keep_alive=75, **settings)


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
