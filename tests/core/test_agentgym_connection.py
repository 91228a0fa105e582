"""Each thread has a connection of its own, which nobody else can close under it; each episode has
an environment of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentr_core.environments.agentgym.client import Connection
from agentr_core.errors import EnvironmentFault, EnvironmentUnavailable


class Ports(ThreadingHTTPServer):
    """Answers with the port that a request came from, and tells when a connection has ended."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = str(self.client_address[1]).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def finish(self) -> None:
        super().finish()
        assert isinstance(self.server, Ports)
        self.server.ended.set()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def ports() -> Iterator[Ports]:
    with Ports() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_thread_keeps_its_connection_and_shares_it_with_none(ports: Ports) -> None:
    server = Connection(ports.url, timeout_s=5, patience_s=0)

    def ask() -> int:
        return int(server.post("/", {}))

    with ThreadPoolExecutor(1) as first_pool, ThreadPoolExecutor(1) as second_pool:
        # One after the other: a pool would give the second thread the connection of the first.
        first, second = first_pool.submit(ask).result(), second_pool.submit(ask).result()
        assert first != second
        assert (first_pool.submit(ask).result(), second_pool.submit(ask).result()) == (first, second)


def test_the_connection_of_a_thread_ends_with_it(ports: Ports) -> None:
    server = Connection(ports.url, timeout_s=5, patience_s=0)
    thread = threading.Thread(target=server.post, args=("/", {}))
    thread.start()
    thread.join()
    assert ports.ended.wait(5)


class Endless(BaseHTTPRequestHandler):
    """Answers with white space: as much as is asked for at once, or a little at a time."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(100):
                self.wfile.write(b" " * (2**16 if self.path == "/large" else 1))
                time.sleep(0 if self.path == "/large" else 0.05)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("/large", EnvironmentFault, "it has more than 1 MiB; raise environment.options.answer_mib"),
        ("/slow", EnvironmentUnavailable, r"gave no answer within 0\.3 s"),
    ],
)
def test_an_answer_is_neither_larger_nor_later_than_allowed(path: str, error: type[Exception], said: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        start = time.monotonic()
        with pytest.raises(error, match=said):
            Connection(
                f"http://127.0.0.1:{server.server_port}",
                timeout_s=0.3 if path == "/slow" else 60,
                patience_s=0,
                answer_mib=1,
            ).post(path, {})
        assert time.monotonic() - start < 2
        server.shutdown()


def test_an_environment_is_lent_once_at_a_time() -> None:
    server = Connection("http://127.0.0.1:9", timeout_s=5, patience_s=0)

    def refused(env_id: int) -> bool:
        try:
            server.lend_new(env_id)
        except EnvironmentUnavailable:
            return True
        return False

    before = server.lend_new(3)
    assert refused(3)
    assert server.take_back(3, before)
    assert not refused(3)
    server.make_spare(3, before)
    server.lend_new(4)
    server.make_spare(4, before, as_last=True)
    assert (server.lend_spare(), server.lend_spare(), server.lend_spare()) == ((3, before), (4, before), None)
    assert refused(4)
    server.make_spare(3, before)
    assert (refused(3), server.lend_spare()) == (False, None)

    with pytest.raises(EnvironmentUnavailable, match="cannot be reached"):
        server.reach()
    # After a restart the ids begin anew, and what was lent before it is nobody's.
    assert not refused(4)
    server.make_spare(4, before)
    assert not server.take_back(4, before)
    assert (server.lend_spare(), refused(4)) == (None, True)
