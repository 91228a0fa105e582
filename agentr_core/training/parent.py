"""The model that a training starts from: a whole model, or one with an adapter whose training
continues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from agentr_core.errors import ConfigError, ModelDirectoryError, TrainingFault
from agentr_core.models.files import adapter_base
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.attention import use_training_attention

_ADAPTED: Final = re.compile(r"\.(?:base_layer|original_module)\.")
"""What PEFT puts into the names of weights below an adapter, and of those trained in a copy."""
_ROUNDING: Final = 1e-3
"""The largest difference of logits, relative to the largest of them, that rounding in 32 bits can
explain; 1e-6 was observed.
"""
_SCORED: Final = 16


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
        ConfigError: the shape of the adapter in the directory differs from the settings, or it
            changes one of several modules that share a weight.
        TrainingFault: the adapter in the directory cannot be merged.
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
    if faults := tied_faults(model, model_dir):
        raise ConfigError("; ".join(faults))
    # An adapter that is not loaded for training has frozen the weights below it.
    return Parent(model if config.lora_r else merge(model).requires_grad_(True), tokenizer, dtype, None)


def merged(base: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Return the model in `base`, on the CPU, with an adapter added to its weights in 32 bits, and
    then converted to `dtype`. Raises `TrainingFault` as `merge` does.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return merge(PeftModel.from_pretrained(model, adapter)).to(dtype)


def merge(adapted: Any) -> Any:
    """Return a model with its adapter added to its weights.

    Raises `TrainingFault` if it then computes something else: not every adapter can be added to
    weights, and PEFT only warns.
    """
    apart = _scores(adapted)
    model = adapted.merge_and_unload()
    # The middle of the differences: rounding may send a token to another expert.
    difference = float((_scores(model) - apart).abs().amax(-1).median())
    # Not "greater than", which is false of no number.
    if not difference <= _ROUNDING * max(1.0, float(apart.abs().max())):
        raise TrainingFault(
            f"with the adapter merged into its weights, the model gives other scores than with the adapter apart (by "
            f"{difference:.2g}); set training.publish=adapter, or train other modules (training.lora_target_modules, "
            "training.lora_modules_to_save)"
        )
    return model


def tied_faults(adapted: Any, model_dir: Path) -> list[str]:
    """Return why adapters would publish another model than the trained one: a sentence if one
    changes a weight in one of the places that share it.

    Merged, it would change the others, too, or the model would no longer share the weight.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    shared = [name for names in places.values() if len(names) > 1 for name in names]
    changed = [found[0].rpartition(".")[2] for name in shared if (found := _ADAPTED.split(name, maxsplit=1))[1:]]
    if not changed:
        return []
    return [
        f"training.lora_target_modules and training.lora_modules_to_save: {', '.join(dict.fromkeys(changed))} of "
        f"{model_dir} shares its weight with another module (tied embeddings), which an adapter on one of them would "
        "change, too, once it is merged; leave that module out, or train all weights (training.lora_r=0)"
    ]


@torch.no_grad()
def _scores(model: Any) -> torch.Tensor:
    """Return the logits of a few token ids, in evaluation mode."""
    training = model.training
    model.eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[(7 * number + 1) % vocabulary for number in range(_SCORED)]], device=model.device)
    scores: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    model.train(training)
    return scores


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
