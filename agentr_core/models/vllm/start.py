"""From a recipe's model to a running fleet: what is served on this machine, and in which
environment.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory, context_length_of
from agentr_core.models.files import adapter_base, read_json, weights_sha256
from agentr_core.models.vllm.command import Launch, check_compiler
from agentr_core.models.vllm.env import Device, engine_version, ensure
from agentr_core.models.vllm.lora import served_adapter
from agentr_core.models.vllm.replicas import Replicas
from agentr_core.recipes.models import ModelConfig

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
