"""A real HTTP server that answers nobody until a crowd of requests is there, all at once and each
by itself.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentr_core.models.connections import allow_connections

CROWD = 1100
"""More than the thousand connections that a client of OpenAI's library allows by itself."""


class Crowd:
    """Counts the requests under way; when `size` are there, each gets `answer`, and so do all later
    ones.
    """

    def __init__(self, size: int, answer: bytes) -> None:
        self._size = size
        self._answer = answer
        self._complete = asyncio.Event()
        self.url = ""
        self.under_way = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        await reader.readexactly(length)
        self.under_way += 1
        if self.under_way >= self._size:
            self._complete.set()
        await self._complete.wait()
        start = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{start}Content-Length: {len(self._answer)}\r\n\r\n".encode() + self._answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def crowd(size: int, answer: bytes) -> AsyncIterator[Crowd]:
    """Serve for the length of the block. Both ends of each connection are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * size + 512:
        pytest.skip(f"this machine lets a process open {hard} files, too few for {size} connections")
    allow_connections(2 * size)
    crowd_server = Crowd(size, answer)
    server = await asyncio.start_server(crowd_server.serve, "127.0.0.1", 0, backlog=2 * size)
    crowd_server.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with server:
            yield crowd_server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
