"""What a server of environments does not let in: requests of web pages, and bodies without end."""

from __future__ import annotations

from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES: Final = 2**20
"""Of the body of a request; an action is a line or two."""


class Guard:
    """Passes requests on to an application, but for those that a browser sends for a web page, and
    too long ones.

    A page of any site can have a browser post to a server on its user's machine or network.
    Browsers say so in `Origin`, which AgentGym's clients never send.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: 403 for one of a web page, 400 or 413 for a body whose length is wrong
        or too large.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if b"origin" in headers or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            await _refuse(403, "requests of web pages are not answered here", scope, receive, send)
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


async def _read(receive: Receive) -> bytes | None:
    """Return the body of a request, or None for one that is too long whatever it said of its
    length.
    """
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
