"""The model that a training starts from: a whole model, or one with an adapter whose training
continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.models.files import adapter_base
from agentr_core.recipes import TrainingConfig
from agentr_core.training.attention import use_training_attention


class Parent(NamedTuple):
    """A model ready to be trained, its tokenizer, and the number format of its checkpoints.

    `lora` describes the adapters still to be added: none for full training, or if the model already
    has them.
    """

    model: Any
    tokenizer: Any
    dtype: torch.dtype
    lora: Any


def recomputes(config: TrainingConfig) -> bool:
    """Return whether a training here computes activations again in the backward pass."""
    chosen = config.gradient_checkpointing
    return torch.cuda.is_available() if chosen is None else chosen


def text_config(model_dir: Path) -> Any:
    """Return the configuration of the language model in a directory. Raises
    `ModelDirectoryError`.
    """
    with _faults(model_dir):
        return AutoConfig.from_pretrained(adapter_base(model_dir) or model_dir).get_text_config()


def load_parent(model_dir: Path, config: TrainingConfig, *, zero3: bool) -> Parent:
    """Return the model in a directory, prepared for training as the settings say.

    Weights are 32-bit numbers; under bfloat16, weights that only carry adapters keep their format.

    Args:
        zero3: whether DeepSpeed splits the weights among processes while they are read.

    Raises:
        ModelDirectoryError: the model cannot be loaded.
        ConfigError: the shape of the adapter in the directory differs from the settings.
    """
    base = adapter_base(model_dir)
    # The stages of a run show their own progress, when loading and when saving.
    disable_progress_bar()
    with _faults(model_dir):
        model, dtype = read_weights(base or model_dir, config, zero3=zero3)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if base is None:
            return Parent(model, tokenizer, dtype, lora_config(config) if config.lora_r else None)
        if config.lora_r:
            if faults := shape_faults(model_dir, config):
                raise ConfigError("; ".join(faults))
        elif zero3:
            raise ConfigError(
                f"training all weights under ZeRO-3 cannot start from the adapter {model_dir}; publish merged "
                "checkpoints (training.publish), or use zero2"
            )
        model = PeftModel.from_pretrained(
            model, model_dir, is_trainable=bool(config.lora_r), autocast_adapter_dtype=not zero3
        )
    # An adapter that is not loaded for training has frozen the weights below it.
    return Parent(model if config.lora_r else model.merge_and_unload().requires_grad_(True), tokenizer, dtype, None)


def merged(base: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Return the model in `base`, on the CPU, with an adapter added to its weights in 32 bits, and
    then converted to `dtype`.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().to(dtype)


def read_weights(path: Path, config: TrainingConfig, *, zero3: bool) -> tuple[Any, torch.dtype]:
    """Return a whole model in the number format in which the settings train it, and the format in
    which it is stored.
    """
    attention = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    as_it_is = bool(config.lora_r and config.bf16 and not config.lora_modules_to_save)
    if config.load_in_4bit or zero3:
        dtype = AutoConfig.from_pretrained(path).dtype or torch.float32
        options: dict[str, Any] = {"dtype": dtype if as_it_is else torch.float32, **attention}
        if config.load_in_4bit:
            options |= {"quantization_config": _four_bits(), "device_map": {"": torch.cuda.current_device()}}
        return AutoModelForCausalLM.from_pretrained(path, **options), dtype
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **attention)
    if not config.attn_implementation and not torch.cuda.is_available():
        use_training_attention(model)
    dtype = model.dtype
    return (model if as_it_is else model.to(torch.float32)), dtype


def lora_config(config: TrainingConfig) -> Any:
    """Return PEFT's configuration of the adapters that the settings ask for."""
    targets = config.lora_target_modules
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(config.lora_modules_to_save) or None,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
    )


def _four_bits() -> Any:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def shape_faults(path: Path, config: TrainingConfig) -> list[str]:
    """Return the differences between the adapter in a directory and the one that the settings ask
    for, one sentence each.

    Training continues with the existing adapter; a second one on top of it could not be published
    alone.
    """
    there = PeftConfig.from_pretrained(path)
    pairs = {
        "lora_r": (there.r, config.lora_r),
        "lora_alpha": (there.lora_alpha, config.lora_alpha),
        "use_dora": (there.use_dora, config.use_dora),
        "lora_modules_to_save": (set(there.modules_to_save or ()), set(config.lora_modules_to_save)),
    }
    if not isinstance(config.lora_target_modules, str):
        pairs["lora_target_modules"] = (set(there.target_modules), set(config.lora_target_modules))
    return [
        f"training.{name} is {new}, but training goes on with the adapter in {path}, where it is {old}; keep it, or "
        "set training.start_from=base"
        for name, (old, new) in pairs.items()
        if old != new
    ]


@contextmanager
def _faults(model_dir: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelDirectoryError(f"model {model_dir} cannot be loaded: {str(error).splitlines()[0]}") from error
