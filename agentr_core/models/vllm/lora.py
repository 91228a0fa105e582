"""LoRA adapters as vLLM serves them: which it can serve, and over which model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.models.files import ADAPTER_CONFIG, adapter_base, read_json
from agentr_core.recipes.training import VLLM_LORA_RANKS

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
    if faults := _faults(settings):
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


def _faults(settings: Mapping[str, Any]) -> list[str]:
    kind = settings.get("peft_type", "LORA")
    faults = [] if kind == "LORA" else [f"is of the kind {kind}, not LORA"]
    faults += [f"{meaning} ({name})" for name, meaning in _UNSERVED.items() if settings.get(name)]
    faults += [f"is no plain LoRA ({name})" for name in _VARIANTS if settings.get(name)]
    if settings.get("bias", "none") != "none":
        faults.append(f"trains biases (bias: {settings['bias']})")
    return faults
