"""Prefect's server: the one that PREFECT_API_URL names, else one that lives as long as this
process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, get_current_settings

from agentr_core.errors import ConfigError, ServerLost
from agentr_core.system import gc_paused_for_imports
from flows import server_guard

_DATABASE_BYTES = 4 * 2**20
"""Bytes of disk that a new database of Prefect and its first runs take."""


def ensure_server() -> None:
    """Make sure that a server answers: the one that PREFECT_API_URL names, else a new one that is
    started here. Raises `ConfigError` if it does not answer or start.
    """
    address = PREFECT_API_URL.value()
    if address:
        _check_answer(address)
        return
    _check_home()
    try:
        _use_a_server_of_its_own_session()
        get_client(sync_client=True)
    except RuntimeError as error:
        raise ConfigError(
            f"Prefect's own server does not start: {error} Try again, or start one with `prefect server start` and "
            "set PREFECT_API_URL"
        ) from error


def require_server(subject: str) -> None:
    """Raise `ConfigError` unless PREFECT_API_URL names a server that answers. `subject` is what
    needs the server, for the message.
    """
    address = PREFECT_API_URL.value()
    if not address:
        raise ConfigError(
            f"{subject} needs a Prefect server that other processes reach: start one with `prefect server start` and "
            "set PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    _check_answer(address)


@contextmanager
def server_loss_reported() -> Iterator[None]:
    """Turn the HTTP error that Prefect's client raises in the block, when the server no longer
    answers, into `ServerLost`.

    By then the client has retried for minutes. Other HTTP errors are raised unchanged.
    """
    try:
        yield
    except httpx.HTTPError as error:
        if not _is_loss(error):
            raise
        address = f"{error.request.url.scheme}://{error.request.url.netloc.decode()}"
        start = "start it again, and then " if PREFECT_API_URL.value() else ""
        raise ServerLost(
            f"Prefect's server at {address} answers no longer ({error}); {start}the same command goes on where it "
            "stopped"
        ) from error


def deployments_on_work_pools(names: Sequence[str]) -> list[str]:
    """Return those of the deployments, each named `flow/deployment`, that belong to a work pool."""
    pool_deployments = []
    with get_client(sync_client=True) as client:
        for name in names:
            with suppress(ObjectNotFound):
                if client.read_deployment_by_name(name).work_pool_name is not None:
                    pool_deployments.append(name)
    return pool_deployments


def _use_a_server_of_its_own_session() -> None:
    """Make Prefect's server end with this process, not before it, even if this process is killed.

    Ctrl-C, and SIGTERM from many service managers, go to a whole group of processes. A server that
    obeys them is gone when the run tries to end in order, and Prefect's client keeps trying to
    reach it for a minute or more.
    """
    # Not with the other imports: this one loads the whole server, which takes a second and is
    # needed only for a run.
    with gc_paused_for_imports():
        from prefect.server.api.server import SubprocessASGIServer

    guards: list[subprocess.Popen[bytes]] = []

    class Guarded(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            process = _start_server(self.port)
            guards.extend(_start_guard(process))
            return process

    # Registered before Prefect's own handler, so it runs after that one, when the server is gone.
    atexit.register(lambda: [guard.wait(server_guard.GRACE) for guard in guards])

    # Prefect uses one object for all servers without a requested port: the first that is made.
    Guarded()


def _start_server(port: int | None) -> subprocess.Popen[Any]:
    """Start Prefect's server as Prefect itself does, but in a session of its own."""
    options = {"host": "127.0.0.1", "port": str(port), "log-level": "error", "lifespan": "on"}
    server_variables = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        ],
        env={**os.environ, **server_variables, **settings},
        start_new_session=True,
    )


def _start_guard(server: subprocess.Popen[Any]) -> list[subprocess.Popen[bytes]]:
    """Start the process that guards a server, and return it in a list; the list is empty where the
    system has no process descriptors, or a sandbox forbids them.
    """
    if sys.platform != "linux":
        return []
    descriptors: list[int] = []
    try:
        for number in (os.getpid(), server.pid):
            descriptors.append(os.pidfd_open(number))
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", server_guard.__file__, *map(str, descriptors)],
            pass_fds=descriptors,
            # The guard outlives this process, so it must not hold its streams. In a session of its
            # own, no signal from the terminal ends it.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return [guard]
    except OSError:
        # A killed run then leaves its server behind, as it does with Prefect alone.
        return []
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _is_loss(error: httpx.HTTPError) -> bool:
    try:
        is_of_prefect = error.request.headers.get("User-Agent", "").startswith("prefect/")
    except RuntimeError:
        # The error belongs to no request.
        return False
    is_server_error = isinstance(error, httpx.HTTPStatusError) and error.response.status_code >= 500
    return is_of_prefect and (is_server_error or isinstance(error, httpx.TransportError))


def _check_home() -> None:
    """Raise `ConfigError` if a server could not write to PREFECT_HOME: Prefect would wait minutes
    for it before it gives up.
    """
    home = get_current_settings().home
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    if not (home.is_dir() and os.access(home, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"Prefect's own server keeps its data in {home}, which cannot be made or written to; set PREFECT_HOME to "
            "another folder"
        )
    try:
        with TemporaryFile(dir=home) as trial_file:
            trial_file.write(bytes(_DATABASE_BYTES))
    except OSError as error:
        raise ConfigError(
            f"Prefect's own server keeps its data in {home}, where nothing more can be written ({error.strerror}); "
            "free some space, or set PREFECT_HOME to another folder"
        ) from None


def _check_answer(address: str) -> None:
    # Not with Prefect's client, which retries for a minute.
    try:
        with httpx.stream("GET", f"{address.rstrip('/')}/health", timeout=10, follow_redirects=True) as answer:
            # Another program's answer might never end, so only its first part is read.
            body = next(answer.iter_text(), "")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"no Prefect server answers at {address} ({error}); start it with `prefect server start`, or unset "
            "PREFECT_API_URL"
        ) from error
    # A server that asks for a key says nothing more without it; Prefect's client has the key.
    if answer.status_code not in (401, 403) and not (answer.status_code == 200 and body.strip() == "true"):
        raise ConfigError(
            f"what answers at {address} is not a Prefect server (status {answer.status_code}); the address ends with "
            "/api, as in http://127.0.0.1:4200/api; set PREFECT_API_URL to it, or unset it"
        )
