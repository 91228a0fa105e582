"""Connections to HTTP servers: one for each request in flight, enough open files for them, and no
response larger than a recipe allows.

By default OpenAI's client allows a thousand connections, and reports a request that waits for one
as a server that does not answer. HTTP clients read a response of any size, and decompress a small
one even if its content is huge.
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

_NUM_OTHER_FILES = 512
"""Files that a process has open besides its connections: weights, logs, the store, pipes."""


def connection_limits(max_connections: int | None, *, idle_seconds: float) -> Limits:
    """Return the connection limits of a client: at most `max_connections` (None: no limit), all of
    which are kept open for the next request.

    `idle_seconds` is how long an idle connection is kept. It must be shorter than the server's own
    limit, or the server closes a connection just as a request uses it.
    """
    from httpx2 import Limits

    return Limits(
        max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=idle_seconds
    )


def allow_connections(max_connections: int) -> None:
    """Raise this process's limit of open files so that it suffices for `max_connections`, as far as
    the hard limit allows.

    The usual soft limit of 1,024 exists for programs that use `select`; any other program may raise
    its own.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = max_connections + _NUM_OTHER_FILES
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= needed_files:
        return
    new_limit = needed_files if hard_limit == resource.RLIM_INFINITY else min(needed_files, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft_limit, new_limit), hard_limit))


class GarbledAnswer(Exception):
    """The content of a response cannot be decompressed."""


class LargeAnswer(Exception):
    """A response is larger than allowed; it was not read to its end."""


class LateAnswer(Exception):
    """A response began in time, but was not complete in time."""


EVENT_STREAM: Final = "text/event-stream"


class ResponseContent:
    """The content of a response while it arrives: decompressed, and no larger than allowed.

    Args:
        headers: those of the response; `content-encoding` is removed from them.
        max_bytes: the most bytes, after decompression.

    Raises `GarbledAnswer` for an encoding other than gzip, deflate or none.
    """

    def __init__(self, headers: MutableMapping[str, str], max_bytes: int) -> None:
        encoding = headers.pop("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise GarbledAnswer(f"it is packed as {encoding[:40]!r}, which was not asked for")
        # 32: the header of either format, gzip or zlib, is recognised.
        self._decompressor = None if encoding in ("", "identity") else zlib.decompressobj(32 + zlib.MAX_WBITS)
        self._max_bytes, self._remaining = max_bytes, max_bytes
        self._chunks: list[bytes] = []

    def add(self, chunk: bytes) -> None:
        """Append the next part. Raises `LargeAnswer` if the content exceeds the limit,
        `GarbledAnswer` if it cannot be decompressed.
        """
        self._chunks.append(self.decompressed(chunk))

    def decompressed(self, chunk: bytes) -> bytes:
        """Return the next part decompressed, without storing it. Raises what `add` raises."""
        try:
            # One byte more than allowed shows that the content is larger.
            data = chunk if self._decompressor is None else self._decompressor.decompress(chunk, self._remaining + 1)
        except zlib.error as error:
            raise GarbledAnswer(f"it cannot be unpacked ({error})") from None
        self._remaining -= len(data)
        if self._remaining < 0:
            raise LargeAnswer(f"it has more than {self._max_bytes / MIB:g} MiB")
        return data

    def to_bytes(self) -> bytes:
        """Return everything that was added. Raises `GarbledAnswer` if a compressed content is cut
        off.
        """
        if self._decompressor is not None and self._chunks and not self._decompressor.eof:
            raise GarbledAnswer("it is cut off")
        return b"".join(self._chunks)


def async_read_hooks(max_bytes: int) -> dict[str, list[Callable[[Any], Coroutine[Any, Any, None]]]]:
    """Return `event_hooks` for an asynchronous client, with which it reads each response to its end
    before a request returns. The request raises `LargeAnswer` above `max_bytes` bytes, and
    `GarbledAnswer`.

    A successful response to a request that accepts `EVENT_STREAM` is read as it arrives instead;
    then reading it raises these errors.
    """

    async def read(response: Any) -> None:
        content, stream = ResponseContent(response.headers, max_bytes), response.stream
        if response.is_success and response.request.headers["accept"] == EVENT_STREAM:

            async def chunks() -> AsyncIterator[bytes]:
                async for chunk in stream:
                    yield content.decompressed(chunk)

            response.stream = type(response)(response.status_code, content=chunks()).stream
            # A stream made of an iterator does not close what it reads.
            response.stream.aclose = stream.aclose
            return
        async for chunk in stream:
            content.add(chunk)
        await stream.aclose()
        # What was read, as a stream of a response of the same class, whichever HTTP library the
        # client uses.
        response.stream = type(response)(response.status_code, content=content.to_bytes()).stream

    return {"request": [_request_gzip_async], "response": [read]}


def sync_read_hooks(max_bytes: int) -> dict[str, list[Callable[[Any], None]]]:
    """Return `event_hooks` for a synchronous client that do the same as those of
    `async_read_hooks`, without `EVENT_STREAM`. If a request's extension `until` is a time of the
    monotonic clock, a response of which parts still arrive after it raises `LateAnswer`.
    """

    def read(response: Any) -> None:
        content, stream = ResponseContent(response.headers, max_bytes), response.stream
        deadline = response.request.extensions.get("until")
        for chunk in stream:
            content.add(chunk)
            if deadline is not None and time.monotonic() > deadline:
                raise LateAnswer("it was not whole in time")
        stream.close()
        response.stream = type(response)(response.status_code, content=content.to_bytes()).stream

    return {"request": [_request_gzip], "response": [read]}


def _request_gzip(request: Any) -> None:
    request.headers["Accept-Encoding"] = "gzip"


async def _request_gzip_async(request: Any) -> None:
    _request_gzip(request)
