"""What a recipe leaves to the machine: number formats, and how many processes train.

A number format `auto` is bfloat16 where the machine computes that fast, else float32.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from agentr_core.recipes.models import ModelConfig
from agentr_core.recipes.recipe import Recipe, replace
from agentr_core.system import DISTRIBUTION, processors

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_MAX_PROCESSES = 4
"""The most processes of a trainer without a GPU: each holds the model and does a part of each step.
"""
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux's names for the instructions that multiply in bfloat16: two on x86, one on Arm."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that models have here, in bytes: of each GPU, or of the machine without one."""

    total: float
    free: float
    gpu: str = ""
    """The name of the first GPU; empty without one."""


def memory() -> Memory:
    """Return the memory of the first GPU, or main memory without one, and how much of it is free
    now. In a container, its limit counts.
    """
    # Slow to import.
    import psutil
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return Memory(total=total, free=free, gpu=torch.cuda.get_device_name(0))
    now = psutil.virtual_memory()
    total, free = now.total, now.available
    limit, usage = (_read_int(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and usage is not None and limit < total:
        total, free = limit, min(free, limit - usage)
    return Memory(total=total, free=free)


def machine_facts() -> dict[str, str]:
    """Return facts about the code and the machine of a run, as text by name: `commit`, if it is
    known; `processor`, `memory` and `system`; and `gpu`, if PyTorch sees one.
    """
    # Slow to import.
    import psutil
    import torch

    cpuinfo = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    match = re.search(r"^model name\s*: *(.+)$", cpuinfo, re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    code = commit()
    facts = {
        **({"commit": code} if code else {}),
        "processor": f"{name}, {processors()} of {psutil.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": platform.platform(terse=True),
    }
    if torch.cuda.is_available():
        count, total = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
        facts["gpu"] = f"{count} of {torch.cuda.get_device_name(0)}, {total / 2**30:.0f} GiB each"
    return facts


def commit(package: str = DISTRIBUTION) -> str:
    """Return the commit of the code: that of the clone that it runs from, with `+` if files of it
    were changed since, or that which pip installed it from; empty where neither is known.
    """
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "--no-optional-locks", "describe", "--always", "--abbrev=40", "--dirty=+"]
        # Variables of a hook would lead to another repository.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        with suppress(OSError, subprocess.SubprocessError):
            git = subprocess.run(
                [*command, "--exclude=*"], capture_output=True, text=True, check=True, timeout=10, env=env
            )
            return git.stdout.strip()
    with suppress(PackageNotFoundError, ValueError, AttributeError):
        source = json.loads(distribution(package).read_text("direct_url.json") or "{}")
        return str(source.get("vcs_info", {}).get("commit_id", ""))
    return ""


def _read_int(file: Path) -> int | None:
    """Return the number in a file of the kernel; None if it cannot be read or holds a word, such as
    `max`.
    """
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# Were `auto` part of an id, a run could be resumed in another number format on another machine.
def resolve_auto(recipe: Recipe) -> Recipe:
    """Return a recipe in which each `auto` of `dtype`, `bf16` and `num_processes` is replaced by
    what suits this machine.

    A run's id is made of the resolved recipe, so it depends on the number formats and the number of
    processes that the run used.
    """
    models = {role: model and _resolve_dtype(model) for role, model in vars(recipe.models).items()}
    training = recipe.training
    if training.bf16 == "auto":
        training = dataclasses.replace(training, bf16=bool(bfloat16_hardware()))
    launch = training.launch
    if launch is not None and launch.num_processes == "auto":
        # Slow to import.
        import torch

        processes = torch.cuda.device_count() or min(processors(), _MAX_PROCESSES)
        training = dataclasses.replace(training, launch=dataclasses.replace(launch, num_processes=processes))
    return replace(
        recipe,
        model=_resolve_dtype(recipe.model),
        models=dataclasses.replace(recipe.models, **models),
        training=training,
    )


def bfloat16_hardware(device: str = "auto") -> str:
    """Return the name of the GPU, or of the processor's instructions such as "avx512_bf16", that
    computes bfloat16 fast; empty where nothing does.

    Args:
        device: "cpu"; any other name means a GPU where PyTorch sees one.
    """
    # Slow to import.
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name() if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    return bfloat16_instruction(_CPUINFO.read_text(encoding="utf-8")) if _CPUINFO.exists() else ""


def bfloat16_instruction(processor: str) -> str:
    """Return the first of `_INSTRUCTIONS` that the text of /proc/cpuinfo lists; empty if it lists
    none.
    """
    flags = set(processor.split())
    return next((name for name in _INSTRUCTIONS if name in flags), "")


def number_formats(recipe: Recipe, *, with_training: bool = True) -> str:
    """Return one line with the number format in which each local model of a resolved recipe is
    sampled and, `with_training`, that of training; empty if there is nothing to name.
    """
    sampling_formats = [
        f"{role} {model.dtype}" for role, model in recipe.own_models().items() if model.backend != "openai"
    ]
    training_formats = [f"training {'bfloat16' if recipe.training.bf16 else 'float32'}"] if with_training else []
    if not (text := ", ".join([*sampling_formats, *training_formats])):
        return ""
    return f"number formats: {text}; {bfloat16_note()}"


def accelerator_lines() -> list[str]:
    """Return two lines for a person: the version of PyTorch, and the GPUs that it sees."""
    # Slow to import.
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return [
        f"torch: {torch.__version__}, {build}",
        f"gpu: {', '.join(gpus) or 'PyTorch sees none; models run on the processor'}",
    ]


def bfloat16_note() -> str:
    """Return a phrase that says whether this machine computes bfloat16 fast, and with what."""
    fast = bfloat16_hardware()
    return f"bfloat16 is fast here ({fast})" if fast else "bfloat16 is not fast here"


def _resolve_dtype(model: ModelConfig) -> ModelConfig:
    if model.dtype != "auto":
        return model
    fast = model.backend != "openai" and bfloat16_hardware(model.device)
    return dataclasses.replace(model, dtype="bfloat16" if fast else "float32")
