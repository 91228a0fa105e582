"""How one replica is started, as pure functions: its command line, its environment variables, and
the cause of its end in its log.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentr_core.errors import ConfigError
from agentr_core.models.vllm.env import Device
from agentr_core.models.vllm.lora import Adapter
from agentr_core.models.vllm.server import agentr_serve, agentr_weights
from agentr_core.recipes.models import Dtype, VllmConfig

HOST = "127.0.0.1"
BASE_NAME = "base"
"""The name of the model below an adapter; no request uses it."""
_OURS = frozenset(
    ("model", "host", "port", "dtype", "max-model-len", "served-model-name", "generation-config", "enforce-eager",
     "enable-prefix-caching", "tensor-parallel-size", "gpu-memory-utilization", "seed", "enable-chunked-prefill",
     "tokenizer", "enable-lora", "max-lora-rank", "lora-modules", "middleware", "api-key", "api-server-count",
     "worker-extension-cls", "headless", "grpc", "data-parallel-multi-port-external-lb")
)  # fmt: skip
_FROM_PARENT = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Environment variables of ours that would affect the engine's Python."""
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .*)")
_PREFIX = re.compile(r"^(\([A-Za-z_]+\d*(?: [^)]*)?pid=\d+\)\s*)+")
_TOLD = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a replica serves, and how. Replicas of equal launches give equal answers.

    `served_name` is the model's name in requests. It identifies the weights, so that a request
    never meets others. `model` is the directory that was asked for; if that is an adapter,
    `adapter` describes the model below it.
    """

    model: Path
    served_name: str
    device: Device
    dtype: Dtype
    context_length: int
    settings: VllmConfig
    implementation: str = "auto"
    """Which implementation of the model vLLM runs, as in its option `model-impl`."""
    adapter: Adapter | None = None
    key: str = field(default="", repr=False)
    """The key that a request must have; its holder may replace the weights. Empty: anybody on this
    machine is answered, and the weights stay.
    """

    @property
    def eager(self) -> bool:
        """Whether the model is run without being compiled."""
        wanted = self.settings.enforce_eager
        return self.device == "cpu" if wanted is None else wanted


def command(python: Path, launch: Launch, port: int) -> list[str]:
    """Return the command line of one replica.

    Raises `ConfigError` if the recipe sets an option that agentr sets itself, or asks a CPU to
    sleep.
    """
    settings = launch.settings
    if settings.sleep and launch.device == "cpu":
        raise ConfigError("model.vllm.sleep: only on a GPU does vLLM give its memory back; leave it out")
    taken = sorted(name for name in settings.options if name.removeprefix("no-") in _OURS)
    if taken:
        raise ConfigError(f"model.vllm.options: {', '.join(taken)} is set by agentr itself; leave it out")
    words = [str(python), str(Path(agentr_serve.__file__).absolute()), *_weights(launch)]
    # With data parallelism vLLM would start several servers, and each would know its own version of
    # the weights.
    words += ["--host", HOST, "--port", str(port), "--api-server-count", "1", "--dtype", launch.dtype]
    words += ["--max-model-len", str(launch.context_length), "--seed", "0"]
    # Otherwise the sampling defaults in a model's generation_config.json would apply.
    words += ["--generation-config", "vllm", "--enable-prefix-caching"]
    if launch.eager:
        words.append("--enforce-eager")
    if launch.device == "cuda":
        words += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
        words += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    elif settings.seeds:
        # A seeded request whose prefill is split in two crashes the engine on a CPU.
        words.append("--no-enable-chunked-prefill")
    if launch.key:
        module = Path(agentr_weights.__file__).stem
        words += ["--middleware", f"{module}.{agentr_weights.Weights.__name__}"]
        words += ["--worker-extension-cls", f"{module}.{agentr_weights.Worker.__name__}"]
        if settings.sleep:
            words.append("--enable-sleep-mode")
    if "model-impl" not in settings.options:
        words += ["--model-impl", launch.implementation]
    for name, value in sorted(settings.options.items()):
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def _weights(launch: Launch) -> list[str]:
    """Return the words that say which weights are served, and under which name; the model comes
    first.
    """
    model, adapter = str(launch.model.absolute()), launch.adapter
    if adapter is None:
        return [model, "--served-model-name", launch.served_name]
    # As JSON, since in NAME=PATH a path may hold neither "=" nor ",".
    module = json.dumps({"name": launch.served_name, "path": model})
    return [
        *(str(adapter.base.absolute()), "--served-model-name", BASE_NAME, "--tokenizer", model),
        *("--enable-lora", "--max-lora-rank", str(adapter.max_rank), "--lora-modules", module),
    ]


def variables(launch: Launch, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of replica `number`. Raises `ConfigError` if there are not
    enough GPUs.
    """
    kept = {name: value for name, value in inherited.items() if name not in _FROM_PARENT}
    kept |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    # The server in Rust runs no middleware: it would answer anybody and could not change weights.
    kept["VLLM_USE_RUST_FRONTEND"] = "0"
    if launch.key:
        kept |= {agentr_weights.KEY: launch.key, "PYTHONPATH": str(Path(agentr_weights.__file__).parent)}
    settings = launch.settings
    if launch.device == "cpu":
        # If vLLM itself bound replicas to cores, all would share the first one.
        return kept | {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.num_threads),
        }
    width, count = settings.tensor_parallel_size, settings.replicas
    wanted = settings.gpu_numbers
    visible = [gpu for gpu in kept.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible and len(visible) <= max(wanted):
        named = f" (GPUs {', '.join(map(str, wanted))} of those)" if settings.gpus else ""
        raise ConfigError(
            f"{count} replicas of {width} GPUs need {max(wanted) + 1}{named}, and CUDA_VISIBLE_DEVICES names "
            f"{len(visible)}; lower model.vllm.replicas or model.vllm.tensor_parallel_size"
        )
    gpus = [visible[gpu] if visible else str(gpu) for gpu in wanted][number * width : (number + 1) * width]
    return kept | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def check_compiler(launch: Launch) -> None:
    """Raise `ConfigError` if the engine compiles code and this machine has no compiler."""
    needed = ("gcc", "cc", "clang") if launch.device == "cuda" else () if launch.eager else ("g++", "clang++")
    if needed and not any(map(shutil.which, needed)):
        way_out = "install one" if launch.device == "cuda" else "install one, or set model.vllm.enforce_eager=true"
        raise ConfigError(f"vLLM compiles code when it starts and finds no compiler ({' or '.join(needed)}); {way_out}")


def check_ports(ports: Sequence[int]) -> None:
    """Raise `ConfigError` when a port is in use."""
    for port in ports:
        with socket.socket() as probe:
            # As servers do, so that lingering connections of an earlier server do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise ConfigError(
                    f"port {port} cannot be used ({error.strerror}); choose another with --port"
                ) from None


def free_ports(count: int) -> list[int]:
    """Return distinct ports that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def cause(log: str) -> str:
    """Return the cause of a program's end according to its log: the first exception, then the last
    lines.
    """
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    told = [line for line in lines if line]
    if not told:
        return "its log is empty"
    found = next((match[1] for line in told if (match := _EXCEPTION.search(line))), "")
    last = " / ".join(line for line in told[-3:] if found not in line or not found)
    return " ... ".join(part[:_TOLD] for part in (found, last) if part)
