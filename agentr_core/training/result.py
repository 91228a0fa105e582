"""Writes the result of a training: a model or PEFT directory, the parent's tokenizer, and the
history of its steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentr_core.models.files import ADAPTER_CONFIG, adapter_base, read_json
from agentr_core.training.checkpoints import ADAPTER, HISTORY, from_here
from agentr_core.training.job import STEP, Job, TrainingStep
from agentr_core.training.parent import merged

_REWRITTEN = ("config.json", "generation_config.json", "manifest.json", "README.md", ADAPTER_CONFIG, HISTORY)


def write_result(
    job: Job,
    model: Any,
    history: Sequence[TrainingStep],
    dtype: torch.dtype,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the result of a training to its staging folder, without a manifest; only the main
    process calls this.

    `model` is the trained model, without the wrappers of trainers. `weights` are given if it holds
    only this process's part of them, as with ZeRO-3, or if its training goes on: otherwise it is
    converted to `dtype`.
    """
    staging = job.work.staging
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir()
    if job.config.lora_r:
        _write_adapted(job, model, weights, dtype)
    elif weights is None:
        model.to(dtype).save_pretrained(staging)
    else:
        model.save_pretrained(staging, state_dict=_cast(weights, dtype))
        # It names the number format of the model, which is not that of these weights.
        file = staging / "config.json"
        stored = {**read_json(file), "dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # The tokenizer and chat template are copied byte for byte: the model's input must not change
    # with its weights.
    for file in sorted(job.model_dir.iterdir()):
        if file.is_file() and file.name not in _REWRITTEN and not _is_weights(file):
            shutil.copyfile(file, staging / file.name)
    (staging / HISTORY).write_bytes(b"".join(STEP.dump_json(step) + b"\n" for step in history))


def _write_adapted(job: Job, model: Any, weights: dict[str, torch.Tensor] | None, dtype: torch.dtype) -> None:
    base = adapter_base(job.model_dir) or job.model_dir
    alone = job.config.publish == "adapter"
    folder = job.work.staging if alone else job.work.staging / ADAPTER
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(from_here(base.resolve()))
    # Preference training may hold a second adapter, its reference.
    model.save_pretrained(folder, state_dict=weights, selected_adapters=["default"])
    if alone:
        return
    if weights is not None:
        # The model is read again to be merged, by this process alone and therefore completely.
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    merged(base, folder, dtype).save_pretrained(job.work.staging)


def _cast(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights in another number format; names that share a tensor still do."""
    cast = {id(tensor): tensor.detach().to("cpu", dtype) for tensor in weights.values()}
    return {name: cast[id(tensor)] for name, tensor in weights.items()}


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")
