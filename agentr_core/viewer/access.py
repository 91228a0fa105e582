"""Access to the pages, and limits on what a browser may do with them."""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE: Final = "agentr_view"
HEADERS: Final = {
    # These pages show texts of models and worlds: whatever the texts contain, none of it is run,
    # loaded or sent.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Sealed:
    """An application whose answers get headers that keep the shown texts from running or loading
    anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, sealed if scope["type"] == "http" else send)


class Locked:
    """An application that admits only requests with the token: first in the address as `?token=`,
    later as a cookie that the answer sets.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with 401 if it has no token."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        if any(name == "token" and self._fits(value) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # One slash: two would lead to another host.
            path = "/" + scope["path"].lstrip("/\\")
            entered = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            entered.set_cookie(COOKIE, self._token, httponly=True, samesite="lax", path="/")
            await entered(scope, receive, send)
        elif self._fits(_cookie(scope)):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse("open the address that `agentr view` printed; it has the token\n", 401)(
                scope, receive, send
            )

    def _fits(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _cookie(scope: Scope) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load("; ".join(value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"cookie"))
    except CookieError:
        return ""
    return jar[COOKIE].value if COOKIE in jar else ""
