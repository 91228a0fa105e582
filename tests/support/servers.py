"""Servers of tests: ports, a Prefect server as a process of its own, and waiting for an answer."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from wheel import PATIENCE, launched

from flows.cli import PREFECT_DEFAULTS

PREFECT = str(Path(sys.executable).with_name("prefect"))


def free_port() -> int:
    """Return a free port of this machine; skip the test where there is none to be had."""
    with closing(socket.socket()) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            pytest.skip(f"no port can be bound here: {error}")
        return int(probe.getsockname()[1])


def wait_for(url: str, body: object = None, *, seconds: float = PATIENCE) -> Any:
    """Return the answer of a server once it is neither an error nor empty."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(url, timeout=30) if body is None else httpx.post(url, json=body, timeout=30)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if answer.is_success and (value := answer.json()):
            return value
        time.sleep(0.2)
    raise AssertionError(f"{url} gave nothing for {seconds} s")


@contextmanager
def served(env: Mapping[str, str], *, ui: bool = False) -> Iterator[dict[str, str]]:
    """Run a Prefect server for the length of the block, with its pages or without; return the
    variables with its address among them.
    """
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    variables = PREFECT_DEFAULTS | {**env, "PREFECT_API_URL": api, "PREFECT_SERVER_UI_API_URL": api}
    pages = "--ui" if ui else "--no-ui"
    with launched([PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), pages], env=variables):
        wait_for(f"{api}/health")
        yield variables
