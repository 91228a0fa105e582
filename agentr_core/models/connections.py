"""Connections to servers: one for each request under way, enough open files for them, and no answer
larger than a recipe allows.

By default OpenAI's client allows a thousand connections, and treats a request that waits for one as
a server that does not answer. Clients of HTTP read an answer of any size, and unpack what is small
and becomes large.
"""

from __future__ import annotations

import resource
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from httpx2 import Limits

MIB: Final = 2**20

_OTHER_FILES = 512
"""Files that a process has open besides its connections: weights, logs, the store, pipes."""


def limits(max_connections: int | None, *, idle_seconds: float) -> Limits:
    """Return the limits of a client: at most `max_connections` (None: no limit), all kept
    for the next request.

    `idle_seconds` is how long an idle connection is kept. It must be shorter than the server's own
    limit, or the server closes a connection just as a request uses it.
    """
    from httpx2 import Limits

    return Limits(
        max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=idle_seconds
    )


def allow_connections(max_connections: int) -> None:
    """Let this process open enough files for `max_connections`, as far as the machine allows.

    The usual limit of 1,024 exists for programs that use `select`, and any program may raise its
    own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = max_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed_files:
        return
    new_limit = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, new_limit), hard))


class GarbledAnswer(Exception):
    """The content of an answer cannot be unpacked."""


class LargeAnswer(Exception):
    """An answer is larger than allowed; it was not read to its end."""


class LateAnswer(Exception):
    """An answer began in time, but was not whole in time."""


EVENTS: Final = "text/event-stream"


class Content:
    """The content of an answer while it arrives: unpacked, and no larger than allowed.

    Args:
        headers: those of the answer; what says that it is packed is removed.
        most: the most bytes, unpacked.

    Raises `GarbledAnswer` for an answer packed in another way than the one that was asked for.
    """

    def __init__(self, headers: MutableMapping[str, str], max_bytes: int) -> None:
        encoding = headers.pop("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise GarbledAnswer(f"it is packed as {encoding[:40]!r}, which was not asked for")
        # 32: a header of either kind, gzip's or zlib's.
        self._unpack = None if encoding in ("", "identity") else zlib.decompressobj(32 + zlib.MAX_WBITS)
        self._max_bytes, self._remaining = max_bytes, max_bytes
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """Take the next part in. Raises `LargeAnswer` and `GarbledAnswer`."""
        self._parts.append(self.unpacked(part))

    def unpacked(self, part: bytes) -> bytes:
        """Return the content of the next part, and keep none of it. Raises as `add`."""
        try:
            # One byte more than may come tells that more comes.
            data = part if self._unpack is None else self._unpack.decompress(part, self._remaining + 1)
        except zlib.error as error:
            raise GarbledAnswer(f"it cannot be unpacked ({error})") from None
        self._remaining -= len(data)
        if self._remaining < 0:
            raise LargeAnswer(f"it has more than {self._max_bytes / MIB:g} MiB")
        return data

    def whole(self) -> bytes:
        """Return the content. Raises `GarbledAnswer` if its end is missing."""
        if self._unpack is not None and self._parts and not self._unpack.eof:
            raise GarbledAnswer("it is cut off")
        return b"".join(self._parts)


def reading(max_bytes: int) -> dict[str, list[Callable[[Any], Coroutine[Any, Any, None]]]]:
    """Return the `event_hooks` of an asynchronous client that read each answer whole, of at most
    `max_bytes` bytes; a request then raises as `Content`. The answer to a request that accepts
    `EVENTS` is read as it arrives, and reading it raises so.
    """

    async def read(response: Any) -> None:
        content, stream = Content(response.headers, max_bytes), response.stream
        if response.is_success and response.request.headers["accept"] == EVENTS:

            async def parts() -> AsyncIterator[bytes]:
                async for part in stream:
                    yield content.unpacked(part)

            response.stream = type(response)(response.status_code, content=parts()).stream
            # A stream made of an iterator does not close what it reads.
            response.stream.aclose = stream.aclose
            return
        async for part in stream:
            content.add(part)
        await stream.aclose()
        # A content that was read, as the client of an answer, of either library, takes it.
        response.stream = type(response)(response.status_code, content=content.whole()).stream

    return {"request": [_ask_for_gzip_later], "response": [read]}


def reading_now(max_bytes: int) -> dict[str, list[Callable[[Any], None]]]:
    """Return the `event_hooks` of a client, as `reading`. A request whose extension `until` is a
    time of the monotonic clock raises `LateAnswer` if parts of its answer still come then.
    """

    def read(response: Any) -> None:
        content, stream = Content(response.headers, max_bytes), response.stream
        until = response.request.extensions.get("until")
        for part in stream:
            content.add(part)
            if until is not None and time.monotonic() > until:
                raise LateAnswer("it was not whole in time")
        stream.close()
        response.stream = type(response)(response.status_code, content=content.whole()).stream

    return {"request": [_ask_for_gzip], "response": [read]}


def _ask_for_gzip(request: Any) -> None:
    request.headers["Accept-Encoding"] = "gzip"


async def _ask_for_gzip_later(request: Any) -> None:
    _ask_for_gzip(request)
