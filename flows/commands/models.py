"""Models on the command line: convert a GGUF file to a model directory, install vLLM, and serve a
model with it until interrupted.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentr_core.errors import ModelServerError
from agentr_core.methods.faults import parse
from agentr_core.models.vllm.door import ReplicaMonitor, open_control_server
from agentr_core.models.vllm.replicas import check_ports, device_of, ensure_environment, make_launch, make_replicas
from agentr_core.recipes.models import ModelConfig
from agentr_core.runtime.machine import resolve_auto
from agentr_core.system import gc_paused_for_imports
from tasks.wiring import vllm_environment

_POLL_SECONDS = 0.5


def install(device: str, *, say: Callable[[str], Any]) -> Path:
    """Install vLLM in an environment of its own, unless it is there, and return the path of that
    environment's Python. Raises `UserError` if that fails.
    """
    return ensure_environment(vllm_environment(), device_of(device), report_line=say)


def import_into(source: str, target: Path, *, dtype: str, cache: Path | None, say: Callable[[str], Any]) -> None:
    """Convert a GGUF file to a model directory; print its class and size, its licence and a sample
    of its output. Raises `UserError` if the file cannot be converted.
    """
    began = time.monotonic()
    with gc_paused_for_imports():
        from agentr_core.models.gguf import import_model

    model = import_model(source, target, dtype=dtype, cache=cache)
    size = sum(file.stat().st_size for file in target.iterdir())
    say(
        f"{target}: {model.model_class}, {model.num_parameters:,} parameters in {dtype}, {size / 1e6:,.0f} MB, "
        f"after {time.monotonic() - began:.0f} s"
    )
    for note in (*model.notes, f"licence: {model.licence}", model.sample_reply):
        say(note)


def settings(path: Path, replicas: int, device: str, overrides: Sequence[str]) -> ModelConfig:
    """Return the settings of the command line as the model section of a recipe. Raises
    `ConfigError` if they are wrong.
    """
    model = {"backend": "vllm", "path": str(path), "device": device, "vllm": {"replicas": replicas}}
    return resolve_auto(parse({"name": "serve", "model": model}, overrides, source="models serve")).model


def serve(model: ModelConfig, *, port: int, logs: Path, say: Callable[[str], Any]) -> None:
    """Serve a model on vLLM replicas until SIGINT or SIGTERM; a replica that dies is restarted.

    Args:
        port: the port of the control server, whose address is AGENTR_VLLM for recipes; replicas
            take the ports after it. 0 means free ports.

    Raises:
        UserError: the model, the settings or a port is wrong, or a replica does not start.
        ModelFault: a replica died too often.
    """
    ports = [port + 1 + number for number in range(model.vllm.replicas)] if port else []
    launch = make_launch(Path(model.path), model)
    # Checked before an installation, which takes minutes.
    check_ports([port, *ports] if port else [])
    replicas = make_replicas(launch, environment=vllm_environment(), logs=logs, report_line=say, ports=ports)
    monitor = ReplicaMonitor(replicas, model, report_line=say)
    with _ending() as stop:
        try:
            with open_control_server(monitor, port) as door:
                say(f"serving {launch.model} on {launch.device}; logs in {logs}")
                _announce(monitor, stop, door=door, say=say)
                monitor.watch(stop)
        finally:
            replicas.close()
            say("the replicas have ended")


def _announce(monitor: ReplicaMonitor, stop: threading.Event, *, door: str, say: Callable[[str], Any]) -> None:
    began = time.monotonic()
    while not (state := monitor.check()).addresses:
        if state.fault:
            raise ModelServerError(state.fault)
        if stop.wait(_POLL_SECONDS):
            return
    for number, address in enumerate(state.addresses):
        say(f"replica {number}: {address}/v1")
    say(f"ready after {time.monotonic() - began:.0f} s; recipes with model.backend=vllm use it after:")
    say(f"  export AGENTR_VLLM={door}")


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """Yield an event that is set by Ctrl-C and SIGTERM, so that both end in the same orderly
    way.
    """
    stop = threading.Event()
    earlier = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
