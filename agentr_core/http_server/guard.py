"""The requests that our servers refuse: those of web pages, and those with oversized bodies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentr_core.http_server.hosts import host_in

MOST_BYTES: Final = 2**20
"""The limit on the body of a request; an action or a query is a line or two."""


class Guard:
    """A filter in front of an application that refuses requests sent by web pages, and those with
    oversized bodies.

    A page of any site can make a browser post to a server on its user's machine or network.
    Browsers reveal this in `Origin`, which none of our clients sends.

    Args:
        hosts: the allowed names in `Host`; None allows any. A page whose own name resolves to this
            machine sends that name there.
        linked: whether a link on a page of any site may lead here. A page that only links here
            cannot read the answer.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None = None, *, linked: bool = False) -> None:
        self._app = app
        self._hosts = hosts
        self._linked = linked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: 403 if a web page sent it, 400 or 413 if the length of its body is
        wrong or too large.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        of_page = b"origin" in headers or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if of_page and not (self._linked and _follows_link(scope, headers)):
            await _refuse(403, "requests of web pages are not answered here", scope, receive, send)
            return
        if self._hosts is not None and host_in(headers.get(b"host", b"").decode("latin-1")) not in self._hosts:
            await _refuse(403, "this server does not answer to that name", scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            await _refuse(400, "Content-Length must be a number of bytes", scope, receive, send)
            return
        body = None if int(length[:20]) > MOST_BYTES else await _read(receive)
        if body is None:
            await _refuse(413, f"a body has at most {MOST_BYTES} bytes", scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, again, send)


def _follows_link(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request opens a whole page in a tab of its own."""
    fetched = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return scope["method"] == "GET" and b"origin" not in headers and fetched == (b"navigate", b"document")


async def _read(receive: Receive) -> bytes | None:
    """Return the body of a request, or None if it is too long, whatever length it declared."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"detail": why}, status, headers={"Connection": "close"})(scope, receive, send)
