"""HTTP servers on this machine: who may ask them, and how they are run."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import uvicorn
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentr_core.errors import ConfigError
from agentr_core.system import host_in

# The requests that our servers refuse: those of web pages, those with oversized bodies, and those
# without the server's token.

MAX_BODY_BYTES: Final = 2**20
"""The limit on the body of a request; an action or a query is a line or two."""
_MAX_READ_BYTES: Final = 2**26
_MAX_READ_SECONDS: Final = 10.0
"""How much of an oversized body is read, and for how long, before it is refused: a client that is
still sending when the connection closes does not read the reason.
"""
MakeRefusal = Callable[[Scope, int, str], Response]
"""A function that makes the answer to a refused request from its scope, a status and a sentence."""


def json_refusal(scope: Scope, status: int, reason: str) -> Response:
    """Return the answer to a refused request in the form of our servers for environments."""
    return JSONResponse({"detail": reason}, status)


class Guard:
    """A filter in front of an application that refuses requests and WebSockets of web pages, and
    requests with oversized bodies.

    A page of any site can make a browser post to a server on its user's machine or network. The
    browser then sends a header `Origin`, which none of our clients sends.

    Args:
        hosts: the allowed names in `Host`; None allows any. This refuses pages whose own host name
            was made to resolve to this machine (DNS rebinding).
        posts: whether forms on pages of this server itself may post.
        linked: whether a link on a page of any site may lead here. A page that only links here
            cannot read the answer.
        refusal: makes the answers to refused requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str] | None = None,
        *,
        linked: bool = False,
        posts: bool = False,
        refusal: MakeRefusal = json_refusal,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._linked = linked
        self._posts = posts
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it: with 403 if a web page sent it or its
        `Host` is not allowed, 400 if its `Content-Length` is no number, 413 if its body is too
        large.
        """
        if scope["type"] == "websocket" and self._fault(scope):
            # Before it is accepted, this is answered with status 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if fault := self._fault(scope):
            await self._refuse(*fault, scope, receive, send)
            return
        length = _header(scope, b"content-length") or "0"
        if not (length.isascii() and length.isdigit()):
            await self._refuse(400, "Content-Length must be a number of bytes", scope, receive, send)
            return
        try:
            body = await _read_body(receive, declared_length=int(length[:20]))
        except ConnectionError:
            # The part of the body that has arrived may look complete, so it is not passed on.
            return
        if body is None:
            await self._refuse(413, f"a body has at most {MAX_BODY_BYTES} bytes", scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    def _fault(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused for its headers, else None."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        is_from_page = b"origin" in headers or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        # A followed link loads a whole page.
        fetch_metadata = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
        method = scope.get("method")
        is_link = method == "GET" and b"origin" not in headers and fetch_metadata == (b"navigate", b"document")
        site = headers.get(b"sec-fetch-site", b"same-origin")
        origin = headers.get(b"origin", b"").partition(b"://")
        is_own_form = method == "POST" and origin[0] in (b"http", b"https") and origin[2] == headers.get(b"host")
        if (
            is_from_page
            and not (self._linked and is_link)
            and not (self._posts and is_own_form and site == b"same-origin")
        ):
            return 403, "requests of web pages are not answered here"
        if self._hosts is not None and host_in(headers.get(b"host", b"").decode("latin-1")) not in self._hosts:
            return 403, "this server does not answer to that name"
        return None

    async def _refuse(self, status: int, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope, status, reason)
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)


class TokenGuard:
    """A filter in front of an application that admits only requests with a token: as their
    `api_key`, or in the address as `?token=`.

    Args:
        why: the reason given to a client without the token.
        cookie: the name of a cookie for browsers. It is set when a page is opened with the token in
            its address, and admits later requests; empty: there is no cookie.
        refusal: makes the answers to refused requests.
        admits: returns whether a request with another key is admitted as well.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        *,
        why: str,
        refusal: MakeRefusal,
        cookie: str = "",
        admits: Callable[[Scope, str], bool] = lambda scope, key: False,
    ) -> None:
        self._app = app
        self._token = token
        self._why = why
        self._refusal = refusal
        self._cookie = cookie
        self._admits = admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request with the token on to the application; refuse any other with 401. If there
        is a cookie, a request with `?token=` is instead redirected to the address without it.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        is_token_in_query = any(name == "token" and self._is_token(value) for name, value in query)
        key = api_key(scope)
        if is_token_in_query and self._cookie:
            # The answer sets the cookie and redirects to the address without the token.
            other_query = urlencode([(name, value) for name, value in query if name != "token"])
            # One slash: two would lead to another host.
            path = "/" + scope["path"].lstrip("/\\")
            redirect = RedirectResponse(f"{path}?{other_query}" if other_query else path, 303)
            redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
            await redirect(scope, receive, send)
        elif (
            is_token_in_query
            or self._is_token(key)
            or (self._cookie and self._is_token(_cookie(scope, self._cookie)))
            or self._admits(scope, key)
        ):
            await self._app(scope, receive, send)
        else:
            await self._refusal(scope, 401, self._why)(scope, receive, send)

    def _is_token(self, value: str) -> bool:
        return secrets.compare_digest(value.encode(), self._token.encode())


def api_key(scope: Scope) -> str:
    """Return the API key that a client sends with a request: that of `Authorization: Bearer`, or
    else of `x-api-key`; the empty string if it sends neither.
    """
    scheme, _, key = _header(scope, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else _header(scope, b"x-api-key")


def _header(scope: Scope, name: bytes) -> str:
    """Return the value of the last header with a name, or the empty string. `name` is in lower
    case.
    """
    return next((value.decode("latin-1") for key, value in reversed(scope["headers"]) if key.lower() == name), "")


def _cookie(scope: Scope, name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load("; ".join(value.decode("latin-1") for key, value in scope["headers"] if key.lower() == b"cookie"))
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


async def _read_body(receive: Receive, *, declared_length: int) -> bytes | None:
    """Return the body of a request, or None if it is longer than `MAX_BODY_BYTES` or declared to
    be. Raises `ConnectionError` if the client disconnects before its end.
    """
    parts: list[bytes] = []
    size = 0
    more = declared_length <= _MAX_READ_BYTES
    try:
        # Only a body that will be refused has a time limit.
        async with asyncio.timeout(_MAX_READ_SECONDS if declared_length > MAX_BODY_BYTES else None) as timeout:
            while more and size <= _MAX_READ_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client left before the end of its request")
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
                if size <= MAX_BODY_BYTES:
                    parts.append(message.get("body", b""))
                elif timeout.when() is None:
                    timeout.reschedule(asyncio.get_running_loop().time() + _MAX_READ_SECONDS)
    except TimeoutError:
        return None
    return b"".join(parts) if max(size, declared_length) <= MAX_BODY_BYTES else None


# Serving an ASGI application at an address, until interrupted.

LOST_CALLBACK_KEY: Final = "agentr.lost"
"""The key under which an application may put a function into the scope of a request. It is called
if the answer cannot have reached the client, even if it was already sent.
"""
STOPPING_CALLBACK_KEY: Final = "agentr.stopping"
"""The same for a function that is called if the server is stopped before the answer is complete."""


class _JoiningTransport:
    """A transport that joins all data written in one iteration of the event loop and sends it at
    once.

    Clients of streams stop reading at the last event. If the end of the answer were sent after it,
    they would close the connection before the end arrives, which looks like a lost answer.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Queue data to be sent at the end of this iteration of the event loop."""
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pieces.append(data)

    @property
    def is_pending(self) -> bool:
        """Whether data is waiting to be sent."""
        return bool(self._pieces)

    def close(self) -> None:
        """Send what is waiting and close the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._transport.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class WatchedConnection(H11Protocol):
    """A connection that calls the functions which an application left under `LOST_CALLBACK_KEY` and
    `STOPPING_CALLBACK_KEY`.

    ASGI itself reports a client that left before its answer was complete. An answer is also lost if
    the client closes its end without reading it: its system then resets the connection.
    """

    def connection_made(self, transport: Any) -> None:
        """Start to serve a new connection."""
        self._joining_transport = _JoiningTransport(transport)
        super().connection_made(self._joining_transport)  # type: ignore[arg-type]

    def eof_received(self) -> None:
        """Report a lost answer if the client closed its end before it got all of it. The connection
        is closed afterwards.
        """
        if self.cycle is not None and (
            not self.cycle.response_complete or self._joining_transport.is_pending or self._is_reset()
        ):
            self._report_lost()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a lost answer if the connection broke or was closed before its end."""
        if self.cycle is not None and (exc is not None or not self.cycle.response_complete):
            self._report_lost()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection, after the answer that is under way if there is one; tell the
        application of that answer's request that the server stops.
        """
        stopping: Any = self.scope.get(STOPPING_CALLBACK_KEY) if self.scope is not None else None
        if stopping is not None and not self.cycle.response_complete:
            stopping()
        super().shutdown()

    def _is_reset(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.EPIPE, errno.ECONNRESET)

    def _report_lost(self) -> None:
        on_lost: Any = self.scope.get(LOST_CALLBACK_KEY)
        if on_lost is not None:
            on_lost()


_SHUTDOWN_SECONDS: Final = 5


def serve(app: ASGIApp, *, host: str, port: int, on_listening: Callable[[str], Any], websockets: bool = False) -> None:
    """Serve an application until interrupted.

    Args:
        port: 0 means any free port.
        on_listening: called with the address, such as `http://127.0.0.1:36001`, once clients can
            connect.
        websockets: whether to accept WebSockets as well.

    Raises `ConfigError` if it cannot listen on the address.
    """
    with _listener(host, port) as listener:
        on_listening(_address(host, listener))
        config = server_config(
            app, websockets=websockets, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS
        )
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def serve_in_thread(app: ASGIApp, *, host: str, port: int) -> Iterator[str]:
    """Serve an application in a thread while the block runs; yield its address. At the end of the
    block, wait until the server has stopped.

    Args:
        port: 0 means any free port.

    Raises `ConfigError` if it cannot listen on the address.
    """
    with _listener(host, port) as listener:
        server = uvicorn.Server(server_config(app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            yield _address(host, listener)
        finally:
            server.should_exit = True
            thread.join()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Accepted connections inherit this option. Without it, the body of each answer waits 40 ms
        # for the acknowledgement of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        # Python appends the address, which the sentence has already.
        reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (while attempting")[0]
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port") from error
    return listener


def _address(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def address_elsewhere(address: str) -> str:
    """Return the address under which other machines reach a server of this machine. In place of
    `0.0.0.0` or `::` it has the IP address of the interface that outgoing packets use, or the host
    name if there is no route; any other address is returned unchanged.
    """
    url = urlsplit(address)
    if url.hostname not in ("0.0.0.0", "::"):
        return address
    family, outside_address = (
        (socket.AF_INET, "192.0.2.1") if url.hostname == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
        try:
            # Connecting a UDP socket sends nothing: it only chooses the route.
            probe_socket.connect((outside_address, 9))
            host = str(probe_socket.getsockname()[0])
        except OSError:
            host = socket.gethostname()
    return f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{url.port}"


def server_config(app: ASGIApp, *, websockets: bool = False, **settings: Any) -> uvicorn.Config:
    """Return the configuration with which applications are served."""
    # Idle connections are kept for longer than clients keep them, so that none is closed while a
    # client sends a request.
    # `WatchedConnection` derives from the protocol of h11, so httptools is not used even where it
    # is installed.
    # Frames of a few hundred bytes cost more to compress than to send.
    return uvicorn.Config(
        app,
        http=WatchedConnection,
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,
        timeout_keep_alive=75,
        **settings,
    )
