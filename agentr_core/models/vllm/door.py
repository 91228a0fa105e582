"""The control server: the small HTTP server of `agentr models serve`. Runs ask it for the replicas'
addresses, or to make them serve other weights.

GET returns the current state. POST, with a recipe's settings for its model, makes the replicas
serve that model. Both answer at once with a `FleetState`; since replicas take time to start,
clients ask again. Only this machine can reach the server.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from agentr_core.errors import AgentrError, ConfigError, ModelFault, ModelServerError, ModelUnavailable
from agentr_core.models.vllm.replicas import HOST, Launch, Replicas, make_launch
from agentr_core.recipes.models import Dtype, ModelConfig
from agentr_core.system import LOOPBACK, host_in

_POLL_SECONDS = 1.0
_TIMEOUT_SECONDS = 60.0
_MAX_REPLACEMENTS = 3
_JSON_TYPE = "application/json"
_MAX_BODY_BYTES = 2**20
_MAX_LENGTH_DIGITS = 9
_MAX_SILENCE_SECONDS = 30.0


class FleetState(BaseModel):
    """The answer of the control server: `addresses` is empty while replicas start, and
    `fault` says why if they cannot.

    `seeds` and `options` are the settings of `model.vllm` with which `agentr models serve` was
    started; no request changes them.
    """

    model: Path
    served_name: str
    seeds: bool = True
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    fault: str = ""


class ServeRequest(BaseModel):
    """A request to the control server to serve a model directory, with the dtype and context length
    of a recipe.

    `suspected` are addresses of replicas that failed a request; they are checked before the server
    answers.
    """

    model: Path
    dtype: Dtype
    context_length: int
    suspected: tuple[str, ...] = ()


class ReplicaMonitor:
    """Watches the replicas, and answers for the control server. Thread-safe."""

    def __init__(self, replicas: Replicas, model: ModelConfig, *, report_line: Callable[[str], None]) -> None:
        self._replicas = replicas
        self._model = model
        self._report_line = report_line
        self._lock = threading.Lock()
        self._state = self._make_state()

    @property
    def state(self) -> FleetState:
        """The state of the replicas when they were last checked."""
        return self._state

    def check(self) -> FleetState:
        """Check the replicas, restart those that died, and return the new state."""
        with self._lock:
            try:
                addresses = self._replicas.poll_addresses() or ()
                self._state = self._make_state(addresses)
            except AgentrError as error:
                self._state = self._make_state(fault=str(error))
            return self._state

    def serve(self, request: ServeRequest) -> FleetState:
        """Make the replicas serve the requested model, unless they already do, without waiting
        until they are ready; return their state. Raises `UserError` for a model that cannot be
        served.
        """
        config = replace(
            self._model, path=str(request.model), dtype=request.dtype, context_length=request.context_length
        )
        launch = make_launch(request.model, config)
        with self._lock:
            if launch.served_name != self._replicas.launch.served_name:
                self._report_line(f"serving {launch.model} from now on")
                self._replicas.serve(launch)
                self._state = self._make_state()
        for address in request.suspected:
            self._replicas.report_failure(address)
        return self.check() if request.suspected else self._state

    def watch(self, stop: threading.Event) -> None:
        """Check the replicas every second until `stop` is set."""
        while not stop.wait(_POLL_SECONDS):
            self.check()

    def _make_state(self, addresses: tuple[str, ...] = (), fault: str = "") -> FleetState:
        launch = self._replicas.launch
        return FleetState(
            model=launch.model,
            served_name=launch.served_name,
            seeds=launch.settings.seeds,
            options=launch.settings.options,
            addresses=addresses,
            fault=fault,
        )


@contextmanager
def open_control_server(monitor: ReplicaMonitor, port: int) -> Iterator[str]:
    """Answer requests at a port of this machine during the block, and yield the server's
    address. Raises `ConfigError` if the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        # For a connection that falls silent: it would keep a thread for ever.
        timeout = _MAX_SILENCE_SECONDS

        def do_GET(self) -> None:
            if refusal := _origin_refusal(self.headers):
                self._refuse(*refusal)
            else:
                self._answer(200, monitor.state)

        def do_POST(self) -> None:
            if refusal := _origin_refusal(self.headers) or _body_refusal(self.headers):
                self._refuse(*refusal)
                return
            content = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                self._answer(200, monitor.serve(ServeRequest.model_validate_json(content)))
            except (AgentrError, ValidationError) as error:
                self._refuse(400, str(error))

        def _refuse(self, status: int, fault: str) -> None:
            # The unread part of a request would be taken for the next one.
            self.close_connection = True
            self._answer(status, monitor.state.model_copy(update={"fault": fault}))

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: requests to the control server are not worth a line."""

        def _answer(self, status: int, state: FleetState) -> None:
            content = state.model_dump_json().encode()
            self.send_response(status)
            self.send_header("Content-Type", _JSON_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
    # `shutdown` waits for the next poll.
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _origin_refusal(headers: Message) -> tuple[int, str] | None:
    """Return the status and reason for refusing a request that a web page made a browser send; None
    for any other.

    A browser names the page in `Origin`; a page whose own name resolves to this machine (DNS
    rebinding) has that name in `Host`.
    """
    if headers.get("Origin") is not None:
        return 403, "web pages are not answered here"
    if host_in(headers.get("Host", "")) not in LOOPBACK:
        return 403, f"this door is {HOST}; it does not answer to another name"
    return None


def _body_refusal(headers: Message) -> tuple[int, str] | None:
    """Return the status and reason for refusing a request by the headers of its body; None if the
    body may be read.
    """
    # A web page can make a browser post to this machine, but not with this content type.
    if headers.get("Content-Type") != _JSON_TYPE:
        return 415, f"the content type of a request is {_JSON_TYPE}"
    length = headers.get("Content-Length")
    if length is None:
        return 411, "a request says the length of its body"
    if not (length.isascii() and length.isdecimal()):
        return 400, "the length of a body is a number of bytes"
    if len(length) > _MAX_LENGTH_DIGITS or int(length) > _MAX_BODY_BYTES:
        return 413, f"a body has at most {_MAX_BODY_BYTES} bytes"
    return None


class RemoteFleet:
    """A Fleet behind the control server of this machine. If it serves weights other than those
    of `launch`, they are replaced.

    When others have replaced our weights for the third time, `poll_addresses` gives up: two runs
    that each restore their own weights would stop each other's replicas for ever.

    Raises `ConfigError` for an invalid address.
    """

    def __init__(self, url: str, launch: Launch) -> None:
        url_parts = urlsplit(url)
        if url_parts.scheme != "http" or not url_parts.hostname or not url_parts.port:
            raise ConfigError(f"{url!r} is not the address of `agentr models serve`; it looks like http://{HOST}:8100")
        self._host_and_port = (url_parts.hostname, url_parts.port)
        self._launch = launch
        self._failed_addresses: set[str] = set()
        # Whether the server has been asked for our weights, or was found to serve them.
        self._was_served = False
        self._num_replaced = 0

    def poll_addresses(self) -> tuple[str, ...] | None:
        """See `Fleet.poll_addresses`; the process of the control server restarts the replicas.

        Raises `ModelServerError` if the server cannot serve our weights, or others keep replacing
        them; `ModelFault` if the replicas of our weights failed; `ModelUnavailable` if the
        server does not answer.
        """
        state = self._fetch_state("GET")
        is_served = state.served_name == self._launch.served_name
        if not is_served and self._was_served:
            self._num_replaced += 1
            if self._num_replaced >= _MAX_REPLACEMENTS:
                raise ModelServerError(
                    f"the servers at {self._url} were made to serve {state.model} instead of {self._launch.model} "
                    f"{self._num_replaced} times: another run, or another model of this one, wants other weights from "
                    "the same `agentr models serve`; start one for each, and give each its own AGENTR_VLLM"
                )
        if not is_served or self._failed_addresses:
            state = self._fetch_state("POST")
            if state.served_name != self._launch.served_name:
                # At the server the same weights have another name, since the name depends on
                # these settings, too.
                settings = self._launch.settings
                differences = ", and ".join(
                    f"model.vllm.{name} is {json.dumps(local)} in the recipe and {json.dumps(remote)} there"
                    for name, local, remote in (
                        ("seeds", settings.seeds, state.seeds),
                        ("options", settings.options, state.options),
                    )
                    if local != remote
                )
                reason = (
                    f"{differences}; give `agentr models serve` the same (-o model.vllm...), or change the recipe"
                    if differences
                    else "they are of another version of agentr, or the files changed just now; start them again"
                )
                raise ModelServerError(
                    f"the servers at {self._url} do not serve {self._launch.model} as the recipe says: "
                    f"{state.fault or reason}"
                )
        self._was_served = True
        if state.fault:
            raise ModelFault(state.fault)
        return state.addresses or None

    def report_failure(self, address: str) -> None:
        """See `Fleet.report_failure`."""
        self._failed_addresses.add(address)

    def close(self) -> None:
        """Do nothing: the replicas outlive a run."""

    @property
    def _url(self) -> str:
        return f"http://{self._host_and_port[0]}:{self._host_and_port[1]}"

    def _fetch_state(self, method: str) -> FleetState:
        body = None
        if method == "POST":
            launch, self._failed_addresses, failed_addresses = self._launch, set(), self._failed_addresses
            body = ServeRequest(
                model=launch.model.absolute(),
                dtype=launch.dtype,
                context_length=launch.context_length,
                suspected=tuple(sorted(failed_addresses)),
            ).model_dump_json()
        with closing(http.client.HTTPConnection(*self._host_and_port, timeout=_TIMEOUT_SECONDS)) as connection:
            try:
                connection.request(method, "/", body, {"Content-Type": _JSON_TYPE})
                return _STATE_ADAPTER.validate_json(connection.getresponse().read(_MAX_BODY_BYTES))
            except (OSError, http.client.HTTPException, ValidationError) as error:
                raise ModelUnavailable(
                    f"`agentr models serve` does not answer at {self._url} ({error}); start it, or unset AGENTR_VLLM"
                ) from error


_STATE_ADAPTER: TypeAdapter[FleetState] = TypeAdapter(FleetState)
