"""The small HTTP server of `agentr models serve`, here called the door: runs ask it for the
replicas' addresses, or to make them serve other weights.

GET returns the current state. POST, with a recipe's settings for its model, makes the replicas
serve that model. Both answer at once with a `State`; since replicas take time to start, clients ask
again. Only this machine can reach the door.
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
_REPLACEMENTS = 3
_JSON = "application/json"
_MOST_BYTES = 2**20
_LENGTH_DIGITS = 9
_SILENCE_SECONDS = 30.0


class State(BaseModel):
    """The answer of the door: `addresses` is empty while replicas start, and `fault` says why if
    they cannot.

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
    """A request to the door to serve a model directory, with the dtype and context length of a
    recipe.

    `suspected` are addresses of replicas that failed a request; they are checked before the door
    answers.
    """

    model: Path
    dtype: Dtype
    context_length: int
    suspected: tuple[str, ...] = ()


class ReplicaMonitor:
    """Watches the replicas, and answers for the door. Thread-safe."""

    def __init__(self, replicas: Replicas, model: ModelConfig, *, tell: Callable[[str], None]) -> None:
        self._replicas = replicas
        self._model = model
        self._tell = tell
        self._lock = threading.Lock()
        self._state = self._present()

    @property
    def state(self) -> State:
        """The state of the replicas when they were last checked."""
        return self._state

    def look(self) -> State:
        """Check the replicas, restart those that died, and return the new state."""
        with self._lock:
            try:
                addresses = self._replicas.advance() or ()
                self._state = self._present(addresses)
            except AgentrError as error:
                self._state = self._present(fault=str(error))
            return self._state

    def serve(self, request: ServeRequest) -> State:
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
                self._tell(f"serving {launch.model} from now on")
                self._replicas.serve(launch)
                self._state = self._present()
        for address in request.suspected:
            self._replicas.suspect(address)
        return self.look() if request.suspected else self._state

    def watch(self, stop: threading.Event) -> None:
        """Check the replicas every second until `stop` is set."""
        while not stop.wait(_POLL_SECONDS):
            self.look()

    def _present(self, addresses: tuple[str, ...] = (), fault: str = "") -> State:
        launch = self._replicas.launch
        return State(
            model=launch.model,
            served_name=launch.served_name,
            seeds=launch.settings.seeds,
            options=launch.settings.options,
            addresses=addresses,
            fault=fault,
        )


@contextmanager
def open_control_server(monitor: ReplicaMonitor, port: int) -> Iterator[str]:
    """Answer requests at a port of this machine during the block, and yield the door's address.
    Raises `ConfigError` if the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        # For a connection that falls silent: it would keep a thread for ever.
        timeout = _SILENCE_SECONDS

        def do_GET(self) -> None:
            if refusal := _forbidden(self.headers):
                self._refuse(*refusal)
            else:
                self._answer(200, monitor.state)

        def do_POST(self) -> None:
            if refusal := _forbidden(self.headers) or _unreadable(self.headers):
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
            """Log nothing: requests to the door are not worth a line."""

        def _answer(self, status: int, state: State) -> None:
            content = state.model_dump_json().encode()
            self.send_response(status)
            self.send_header("Content-Type", _JSON)
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


def _forbidden(headers: Message) -> tuple[int, str] | None:
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


def _unreadable(headers: Message) -> tuple[int, str] | None:
    """Return the status and reason for refusing a request by the headers of its body; None if the
    body may be read.
    """
    # A web page can make a browser post to this machine, but not with this content type.
    if headers.get("Content-Type") != _JSON:
        return 415, f"the content type of a request is {_JSON}"
    length = headers.get("Content-Length")
    if length is None:
        return 411, "a request says the length of its body"
    if not (length.isascii() and length.isdecimal()):
        return 400, "the length of a body is a number of bytes"
    if len(length) > _LENGTH_DIGITS or int(length) > _MOST_BYTES:
        return 413, f"a body has at most {_MOST_BYTES} bytes"
    return None


class RemoteFleet:
    """A Fleet behind the door of this machine. If it serves weights other than those of `launch`,
    they are replaced.

    When others have replaced our weights for the third time, `advance` gives up: two runs that each
    restore their own weights would stop each other's replicas for ever.

    Raises `ConfigError` for an invalid address.
    """

    def __init__(self, url: str, launch: Launch) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ConfigError(f"{url!r} is not the address of `agentr models serve`; it looks like http://{HOST}:8100")
        self._where = (parts.hostname, parts.port)
        self._launch = launch
        self._suspected: set[str] = set()
        # Whether the door has been asked for our weights, or was found to serve them.
        self._served = False
        self._replaced = 0

    def advance(self) -> tuple[str, ...] | None:
        """See `Fleet.advance`; the process behind the door restarts the replicas.

        Raises `ModelServerError` if the door cannot serve our weights, or others keep replacing
        them; `ModelFault` if the replicas of our weights failed; `ModelUnavailable` if the door
        does not answer.
        """
        state = self._ask("GET")
        is_served = state.served_name == self._launch.served_name
        if not is_served and self._served:
            self._replaced += 1
            if self._replaced >= _REPLACEMENTS:
                raise ModelServerError(
                    f"the servers at {self._address} were made to serve {state.model} instead of {self._launch.model} "
                    f"{self._replaced} times: another run, or another model of this one, wants other weights from the "
                    "same `agentr models serve`; start one for each, and give each its own AGENTR_VLLM"
                )
        if not is_served or self._suspected:
            state = self._ask("POST")
            if state.served_name != self._launch.served_name:
                # Behind the door the same weights have another name, since the name depends on
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
                    f"the servers at {self._address} do not serve {self._launch.model} as the recipe says: "
                    f"{state.fault or reason}"
                )
        self._served = True
        if state.fault:
            raise ModelFault(state.fault)
        return state.addresses or None

    def suspect(self, address: str) -> None:
        """See `Fleet.suspect`."""
        self._suspected.add(address)

    def close(self) -> None:
        """Do nothing: the replicas outlive a run."""

    @property
    def _address(self) -> str:
        return f"http://{self._where[0]}:{self._where[1]}"

    def _ask(self, method: str) -> State:
        body = None
        if method == "POST":
            launch, self._suspected, suspects = self._launch, set(), self._suspected
            body = ServeRequest(
                model=launch.model.absolute(),
                dtype=launch.dtype,
                context_length=launch.context_length,
                suspected=tuple(sorted(suspects)),
            ).model_dump_json()
        with closing(http.client.HTTPConnection(*self._where, timeout=_TIMEOUT_SECONDS)) as connection:
            try:
                connection.request(method, "/", body, {"Content-Type": _JSON})
                return _STATE.validate_json(connection.getresponse().read(_MOST_BYTES))
            except (OSError, http.client.HTTPException, ValidationError) as error:
                raise ModelUnavailable(
                    f"`agentr models serve` does not answer at {self._address} ({error}); start it, or unset "
                    "AGENTR_VLLM"
                ) from error


_STATE: TypeAdapter[State] = TypeAdapter(State)
