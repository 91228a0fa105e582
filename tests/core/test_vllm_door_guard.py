"""The door of `agentr models serve` against web pages and broken clients."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentr_core.models.vllm import door as vllm_door
from agentr_core.models.vllm.door import FleetState, open_control_server


class Keeper:
    """Counts what it is asked to serve."""

    def __init__(self) -> None:
        self.state = FleetState(model=Path("m"), served_name="name", addresses=("http://127.0.0.1:1",))
        self.requests: list[Any] = []

    def serve(self, request: Any) -> FleetState:
        self.requests.append(request)
        return self.state


WISH = b'{"model": "m", "dtype": "float32", "context_length": 0}'


@pytest.fixture
def door() -> Iterator[Any]:
    keeper: Any = Keeper()
    with open_control_server(keeper, 0) as address:
        yield SimpleNamespace(port=int(address.rpartition(":")[2]), keeper=keeper)


def send_request(door: Any, method: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    """Return status and fault of the answer to a request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=5)
    connection.putrequest(method, "/", skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    result = response.status, FleetState.model_validate_json(response.read()).fault
    connection.close()
    return result


def post(door: Any, **changes: str | None) -> tuple[int, str]:
    headers = {"Host": f"127.0.0.1:{door.port}", "Content-Type": "application/json", "Content-Length": str(len(WISH))}
    headers |= {name.replace("_", "-"): value for name, value in changes.items() if value is not None}
    headers = {name: value for name, value in headers.items() if changes.get(name.replace("-", "_"), "") is not None}
    return send_request(door, "POST", headers, WISH)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8100", "[::1]:8100"])
def test_a_request_of_this_machine_is_heard(door: Any, host: str) -> None:
    assert post(door, Host=host) == (200, "")
    assert send_request(door, "GET", {"Host": host}) == (200, "")
    assert len(door.keeper.requests) == 1


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Host": "evil.example:8100"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "["}, 403),
        ({"Host": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8100"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "+5"}, 400),
        ({"Content_Length": "many"}, 400),
        ({"Content_Length": str(10**12)}, 413),
        ({"Content_Length": "9" * 5000}, 413),
    ],
)
def test_what_comes_from_elsewhere_or_is_no_request_is_refused_at_once(
    door: Any, changes: dict[str, str | None], status: int
) -> None:
    code, fault = post(door, **changes)
    assert code == status
    assert fault
    assert door.keeper.requests == []
    assert post(door) == (200, ""), "and the door stays open"


def test_a_page_under_another_name_reads_nothing(door: Any) -> None:
    assert send_request(door, "GET", {"Host": "evil.example"})[0] == 403
    assert send_request(door, "GET", {"Host": "localhost", "Origin": "http://evil.example"})[0] == 403


def test_a_client_that_says_nothing_more_is_left(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_door, "_MAX_SILENCE_SECONDS", 0.3)
    keeper: Any = Keeper()
    with open_control_server(keeper, 0) as address:
        before = threading.active_count()
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: 500\r\n\r\n{")
            client.settimeout(10)
            assert client.recv(100) == b""
        for _ in range(100):
            if threading.active_count() <= before:
                break
            threading.Event().wait(0.05)
        assert threading.active_count() <= before
    assert keeper.requests == []
