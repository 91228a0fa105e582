"""Prefect's server: the one that PREFECT_API_URL names, else one of our own for as long as this process lives."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from agentr_core.errors import ConfigError
from flows import server_guard


def reach() -> None:
    """Start a server, or reach the one that PREFECT_API_URL names. Raises `ConfigError` when that cannot be done."""
    address = PREFECT_API_URL.value()
    if address:
        _check(address)
        return
    # Ctrl-C goes to all processes of a terminal. A server that obeys it is gone when the run wants to end in order,
    # and Prefect's client asks for it for a minute; the server ends with this process in any case.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _guard_what_is_started()
        get_client(sync_client=True)
    except RuntimeError as error:
        raise ConfigError(
            f"Prefect's own server does not start: {error} Try again, or start one with `prefect server start` and "
            "set PREFECT_API_URL"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require(who: str) -> None:
    """Raise `ConfigError`, which says who needs it, unless PREFECT_API_URL names a server that answers."""
    address = PREFECT_API_URL.value()
    if not address:
        raise ConfigError(
            f"{who} needs a Prefect server that other processes reach: start one with `prefect server start` and set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    _check(address)


def _guard_what_is_started() -> None:
    """See to it that Prefect's server ends with this process also where that is killed, and Prefect cannot stop it."""
    # Not with the other imports: this one brings the whole server, a second that only a run needs.
    from prefect.server.api.server import SubprocessASGIServer

    guards: list[subprocess.Popen[bytes]] = []

    class Guarded(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            process = super()._run_uvicorn_command()
            guards.extend(_guard(process))
            return process

    # Registered before Prefect's own, so run after it, when the server is gone.
    atexit.register(lambda: [guard.wait(server_guard.GRACE) for guard in guards])

    # Prefect keeps one object for all servers without a wish for a port, whoever makes it first.
    Guarded()


def _guard(server: subprocess.Popen[Any]) -> list[subprocess.Popen[bytes]]:
    """Return the guard of a server; none where the system has no process descriptors, or a sandbox forbids them."""
    if sys.platform != "linux":
        return []
    descriptors: list[int] = []
    try:
        for number in (os.getpid(), server.pid):
            descriptors.append(os.pidfd_open(number))
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", server_guard.__file__, *map(str, descriptors)],
            pass_fds=descriptors,
            # Nothing of ours is held by what outlives us, and what ends us at a terminal does not end it.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return [guard]
    except OSError:
        # A killed run then leaves its server behind, as Prefect by itself does.
        return []
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _check(address: str) -> None:
    # Not with Prefect's client: it tries for a minute.
    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=10)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"no Prefect server answers at {address} ({error}); start it with `prefect server start`, or unset "
            "PREFECT_API_URL"
        ) from error
