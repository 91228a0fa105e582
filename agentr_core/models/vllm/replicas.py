"""Replicas of one model server as child processes: started, watched, restarted when they die, and
ended.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol

from agentr_core.errors import AgentrError, ConfigError, ModelFault, ModelServerError
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory, context_length_of
from agentr_core.models.files import adapter_base, read_json, weights_sha256
from agentr_core.models.vllm import guard
from agentr_core.models.vllm.env import (
    HOST,
    Device,
    Launch,
    cause,
    check_compiler,
    check_ports,
    command,
    engine_version,
    ensure,
    free_ports,
    served_adapter,
    variables,
)
from agentr_core.recipes.models import ModelConfig

_HEALTH_SECONDS = 5.0
_PATIENCE_SECONDS = 30.0
"""How long a suspected replica may take to answer: a busy one is slow, and killing it loses its
work.
"""
_TAIL_BYTES = 1 << 18
_ENDING_SECONDS = guard.GRACE + 5.0


class Fleet(Protocol):
    """A group of replicas as their clients see them. Its methods block for a few seconds at
    most.
    """

    def advance(self) -> tuple[str, ...] | None:
        """Return the addresses of all replicas once each of them answers, otherwise None; restart
        those that died.

        Raises `ModelServerError` if a replica does not start, `ModelFault` if one has died too
        often.
        """
        ...

    def suspect(self, address: str) -> None:
        """Report that a request to a replica failed; the next `advance` checks whether the replica
        still works.
        """
        ...

    def close(self) -> None:
        """Release the replicas. Calling it twice is harmless."""
        ...


@dataclass(slots=True)
class _Replica:
    number: int
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    log_start: int = 0
    ready: bool = False
    suspected: bool = False
    deaths: int = 0
    ever_ready: bool = field(default=False)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"


class Replicas:
    """A Fleet of child processes. None outlives this process, even if it is killed. Thread-safe.

    Args:
        launch: What the replicas serve, and how; `launch.settings` says how many.
        python: The interpreter of the engine's environment.
        logs: The folder of `replica-N.log`.
        ports: One for each replica; if empty, free ones are chosen. A replica keeps its port when
            it is restarted.
        tell: Called with a line when a replica is restarted.
        make_command: Makes the command line of a replica from the interpreter, the launch and a
            port.

    Raises `ConfigError` at once if a port is in use or an option is wrong.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        python: Path,
        logs: Path,
        ports: Sequence[int] = (),
        tell: Callable[[str], None] = lambda line: None,
        make_command: Callable[[Path, Launch, int], list[str]] = command,
    ) -> None:
        check_ports(ports)
        self._launch = launch
        self._python = python
        self._tell = tell
        self._make_command = make_command
        self._lock = Lock()
        self._failure: AgentrError | None = None
        self._closed = False
        count = launch.settings.replicas
        logs.mkdir(parents=True, exist_ok=True)
        chosen = list(ports) or free_ports(count)
        self._replicas = [_Replica(number, chosen[number], logs / f"replica-{number}.log") for number in range(count)]
        for replica in self._replicas:
            make_command(python, launch, replica.port)
            variables(launch, replica.number, os.environ)

    @property
    def launch(self) -> Launch:
        """What is served now."""
        return self._launch

    def advance(self) -> tuple[str, ...] | None:
        """See `Fleet.advance`; the first call starts the replicas."""
        with self._lock:
            if self._closed:
                raise ModelFault("these model servers were stopped; start new ones")
            if self._failure is not None:
                raise self._failure
            try:
                ready = [self._look(replica) for replica in self._replicas]
            except AgentrError as error:
                self._failure = error
                self._stop_all()
                raise
            return tuple(replica.address for replica in self._replicas) if all(ready) else None

    def suspect(self, address: str) -> None:
        """See `Fleet.suspect`."""
        with self._lock:
            for replica in self._replicas:
                replica.suspected |= replica.address == address

    def serve(self, launch: Launch) -> None:
        """Serve another model in the same way on the same ports: stop the replicas, and let
        `advance` start new ones.
        """
        with self._lock:
            self._stop_all()
            self._launch = launch
            self._failure = None
            for replica in self._replicas:
                replica.deaths, replica.ever_ready = 0, False

    def close(self) -> None:
        """End all replicas; return when they are gone."""
        with self._lock:
            self._closed = True
            self._stop_all()

    def _look(self, replica: _Replica) -> bool:
        """Return whether a replica answers; start it if it is not running."""
        if replica.process is None:
            self._start(replica)
            return False
        status = replica.process.poll()
        if status is not None:
            return self._died(replica, f"ended with status {status}")
        if not replica.ready:
            if _answers(replica.port):
                replica.ready = replica.ever_ready = True
                replica.suspected = False
                return True
            if time.monotonic() - replica.began > self._launch.settings.start_timeout:
                limit = f"did not answer within {self._launch.settings.start_timeout:g} s (model.vllm.start_timeout)"
                return self._died(replica, limit)
            return False
        if replica.suspected:
            if not _answers(replica.port, timeout=_PATIENCE_SECONDS):
                return self._died(replica, "no longer answers")
            replica.suspected = False
        return True

    def _start(self, replica: _Replica) -> None:
        line = self._make_command(self._python, self._launch, replica.port)
        replica.log_start = replica.log.stat().st_size if replica.log.exists() else 0
        replica.began = time.monotonic()
        with replica.log.open("ab") as log:
            try:
                replica.process = subprocess.Popen(
                    [sys.executable, "-I", guard.__file__, *line],
                    # The end of this pipe tells the guard that we are gone.
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=variables(self._launch, replica.number, os.environ),
                    start_new_session=True,
                )
            except OSError as error:
                raise ModelServerError(f"the model server cannot be started: {error}") from error

    def _died(self, replica: _Replica, how: str) -> bool:
        _stop(replica)
        with replica.log.open("rb") as stream:
            stream.seek(max(replica.log_start, replica.log.stat().st_size - _TAIL_BYTES))
            reason = cause(stream.read().decode("utf-8", "replace"))
        said = (
            f"replica {replica.number} of {self._launch.model} {how}; its log says: {reason} (all of it: {replica.log})"
        )
        if not replica.ever_ready:
            raise ModelServerError(said)
        replica.deaths += 1
        if replica.deaths > self._launch.settings.restarts:
            raise ModelFault(
                f"{said}; it has died {replica.deaths} times, model.vllm.restarts allows {replica.deaths - 1}"
            )
        self._tell(f"{said}; it is started anew")
        self._start(replica)
        return False

    def _stop_all(self) -> None:
        # First signal all of them, then wait for each: ending takes seconds.
        for replica in self._replicas:
            _tell_to_end(replica)
        for replica in self._replicas:
            _stop(replica)


def _tell_to_end(replica: _Replica) -> None:
    if replica.process is not None and replica.process.stdin is not None:
        with suppress(BrokenPipeError):
            replica.process.stdin.close()


def _stop(replica: _Replica) -> None:
    _tell_to_end(replica)
    if replica.process is not None:
        try:
            replica.process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            replica.process.kill()
            replica.process.wait()
    replica.process, replica.ready, replica.suspected = None, False, False


def _answers(port: int, *, timeout: float = _HEALTH_SECONDS) -> bool:
    """Return whether a server reports that it is healthy. No proxy is used: http.client never uses
    one.
    """
    with closing(http.client.HTTPConnection(HOST, port, timeout=timeout)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


# From a recipe's model to a running fleet: what is served on this machine, and in which
# environment.

_DRIVER_SECONDS = 30.0
_ALL_LAYERS_ALIKE = frozenset(("qwen2", "qwen3"))
"""Model types for which vLLM's own code refuses to mix layers with and without a sliding window."""


def device_of(wanted: str) -> Device:
    """Return the device of an engine; "auto" means CUDA if the driver lists a GPU. Raises
    `ConfigError`.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"model.device {wanted!r} is not for vLLM; use auto, cpu or cuda")
    if wanted == "cpu":
        return "cpu"
    # Importing torch to ask it would take seconds.
    there = shutil.which("nvidia-smi") is not None and _lists_gpus()
    if wanted == "cuda" and not there:
        raise ConfigError("model.device (or --device) is cuda, but nvidia-smi lists no GPU; use auto or cpu")
    return "cuda" if there else "cpu"


def make_launch(path: Path, model: ModelConfig) -> Launch:
    """Return what a replica of a model directory serves, and how.

    Raises `ModelDirectoryError` if the directory is unsound, `ConfigError` if the settings do not
    fit.
    """
    check_model_directory(path)
    adapter = served_adapter(path)
    device = device_of(model.device)
    if adapter is not None and device == "cuda" and model.dtype == "float32":
        raise ConfigError(
            f"on a GPU vLLM serves adapters such as {path} in bfloat16 only; set model.dtype=bfloat16, or use merged "
            "checkpoints (training.publish=merged)"
        )
    context = context_length_of(path, model.context_length)
    behaviour = behaviour_files_sha256(path)
    settings = model.vllm
    name = fingerprint(
        "vllm",
        engine_version(),
        weights_sha256(path),
        behaviour,
        model.dtype,
        context,
        settings.seeds,
        settings.options,
    )
    return Launch(
        model=path,
        served_name=name,
        device=device,
        dtype=model.dtype,
        context_length=context,
        settings=settings,
        implementation=implementation_of(path),
        adapter=adapter,
    )


def implementation_of(path: Path) -> str:
    """Return which implementation of a model vLLM is to run: that of Transformers if vLLM's own
    refuses the model, otherwise vLLM's default.
    """
    config = read_json((adapter_base(path) or path) / "config.json")
    mixed = len(set(config.get("layer_types") or ())) > 1
    return "transformers" if mixed and config["model_type"] in _ALL_LAYERS_ALIKE else "auto"


def start(
    launch: Launch, *, environment: Path, logs: Path, tell: Callable[[str], None], ports: Sequence[int] = ()
) -> Replicas:
    """Return replicas that start with the first `advance`; make their environment first if there is
    none.

    Raises `ConfigError` if this machine lacks something, `ModelServerError` if the environment
    cannot be made.
    """
    check_compiler(launch)
    python = ensure(environment, launch.device, tell=tell)
    return Replicas(launch, python=python, logs=logs, ports=ports, tell=tell)


def _lists_gpus() -> bool:
    listing = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
    )
    return listing.returncode == 0 and "GPU" in listing.stdout
