"""Checks whether adapters fit a model, on the model's shape alone: no weight is read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.models.files import adapter_base
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.parent import lora_config, shape_faults, tied_faults
from agentr_core.training.zero import read_zero, splits_weights


def skeleton(model_dir: Path) -> Any:
    """Return the model of a directory with weights that take no memory. Raises
    `ModelDirectoryError`.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config()
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    # What a foreign configuration makes a library raise is anyone's guess.
    except Exception as error:
        raise ModelDirectoryError(f"{model_dir} describes no model: {str(error).splitlines()[0]}") from error


def adapted(model: Any, config: TrainingConfig) -> Any:
    """Return a model with the adapters of the settings added. Raises what PEFT raises if they do
    not fit.
    """
    return _with(model, lora_config(config))


def plain_faults(model: Any) -> list[str]:
    """Return why `whole_weights` cannot add the adapters of a model, one sentence each: an adapter
    that training goes on with may have more than the two matrices of plain LoRA.
    """
    strange = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not re.search(r"\.lora_(?:[AB]\.\w+\.weight|embedding_[AB]\.\w+)$", name)
    ]
    strange += [name for name, module in model.named_modules() if isinstance(module, ParamWrapper)]
    if not strange:
        return []
    return [
        f"group RL trains plain LoRA adapters on whole modules, and this one also trains {strange[0]}; merge it into "
        "its model, and set training.lora_r for a new one"
    ]


def whole_weights(
    model: Any,
    dtype: torch.dtype,
    *,
    gathered: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = lambda parameters: nullcontext(),
    wanted: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the weights of a model, each once, on the CPU, by their names in the model without
    adapters. Plain LoRA adapters are added to them in 32 bits, as a merge adds them.

    Args:
        gathered: gives a context in which parameters are whole, if this process holds parts of
            them that are no DTensors.
        wanted: whether this process wants them; if not, it returns nothing, and only helps others
            that hold parts of them.
    """
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    adapters = {name: module for name, module in bare.named_modules() if isinstance(module, LoraLayer)}
    weights: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in bare.named_parameters():
            owner, _, field = name.rpartition(".base_layer.")
            changed = owner in adapters and field == "weight"
            if not owner and any(name.startswith(f"{place}.lora_") for place in adapters):
                continue
            with gathered(list(adapters[owner].parameters()) if changed else [parameter]):
                weight = full(parameter)
                if changed:
                    weight = weight.float() + full(adapters[owner].get_delta_weight("default")).float()
                if wanted:
                    plain = name.replace(".base_layer.", ".")
                    weights[plain] = weight.detach().to("cpu", dtype, copy=True).contiguous()
    return weights


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, whole if it is a DTensor, of which each process holds a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter_faults(model_dir: Path, config: TrainingConfig) -> list[str]:
    """Return why the adapters that the settings ask for do not fit a model, one sentence each.

    If the model directory is itself an adapter, training continues with that adapter. Raises
    `ModelDirectoryError` when the directory does not give the shape of a model.
    """
    base = adapter_base(model_dir)
    if base is not None:
        faults = shape_faults(model_dir, config) if config.lora_r else []
        if not config.lora_r and _zero3(config):
            faults.append(_cannot_merge(model_dir))
        return faults or tied_faults(_with(skeleton(base), PeftConfig.from_pretrained(model_dir)), model_dir)
    if not config.lora_r:
        return []
    model = skeleton(model_dir)
    targets = config.lora_target_modules
    faults = [
        *(_strangers("lora_target_modules", targets, model) if not isinstance(targets, str) else []),
        *_strangers("lora_modules_to_save", config.lora_modules_to_save, model),
    ]
    return faults or _refusal(model, config, model_dir)


def _refusal(model: Any, config: TrainingConfig, model_dir: Path) -> list[str]:
    """Return the objection of PEFT to the adapters of the settings, or the one that TRL would
    have.
    """
    field = "training.lora_target_modules"
    try:
        made = adapted(model, config)
    except (ValueError, TypeError, re.error) as error:
        return [f"{field}: {str(error).splitlines()[0]} (model {model_dir})"]
    if faults := tied_faults(made, model_dir):
        return faults
    if isinstance(made.get_output_embeddings(), BaseTunerLayer):
        return [f"{field}: an adapter on the output layer of {model_dir} is never trained; leave that module out"]
    return []


def _with(model: Any, adapter: PeftConfig) -> Any:
    with warnings.catch_warnings():
        # PEFT asks for an attribute that Transformers has renamed, and tells of shared weights,
        # which `tied_faults` refuses.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*tie_word_embeddings=True", UserWarning)
        return get_peft_model(model, adapter)


def _strangers(field: str, names: Sequence[str], model: Any) -> list[str]:
    """Return a sentence if some names match no module; PEFT only requires one match, and ignores
    the other names.

    Source: PEFT takes a module whose full name is the name, or ends with a dot and the name.
    """
    there = [path for path, _ in model.named_modules() if path]
    strange = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in there)]
    if not strange:
        return []
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in there if not path.rpartition(".")[2].isdigit()))
    return [f"training.{field}: the model has no module {', '.join(strange)}; it has {known}"]


def _zero3(config: TrainingConfig) -> bool:
    name = config.launch.deepspeed if config.launch else ""
    try:
        return bool(name) and splits_weights(read_zero(name))
    except ConfigError:
        # Reported by `requirements`.
        return False


def _cannot_merge(model_dir: Path) -> str:
    return (
        f"training all weights under ZeRO-3 cannot start from the adapter {model_dir}; begin with a merged model, or "
        "use zero2"
    )
