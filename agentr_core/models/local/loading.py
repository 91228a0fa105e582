"""Loads a Hugging Face model directory for the decode loop, and checks that the loop suits its
architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agentr_core.errors import AgentrError, ConfigError, ModelDirectoryError
from agentr_core.models.checkpoint_dir import ADAPTER_WEIGHTS, adapter_base
from agentr_core.models.local.cache import CACHE, AttentionLayers, KVShape
from agentr_core.models.local.decoding import Decoder, Reply, pack_linears, use_grouped_attention
from agentr_core.models.local.waves import DecodeBatch, Row
from agentr_core.samples.rendering import Renderer

# The device that a model in this process runs on, by its name in a recipe.


def torch_device(name: str, *, field: str = "model.device") -> torch.device:
    """Return the device that a recipe names; "auto" is CUDA if available. `field` is the name of
    the setting in error messages.

    Raises `ConfigError` if the device does not exist or is neither a CPU nor CUDA.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field} {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field} is {name!r}, which this backend does not run on; use auto, cpu or cuda")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"{field} is {name!r}, but torch sees no CUDA device; use auto or cpu")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"{field} is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices, counted from 0; name one "
            "of them, or use auto"
        )
    return device


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BY_LENGTH = ("dynamic", "longrope")
_TOLERANCE = {"float32": 0.01, "bfloat16": 0.5}
"""The largest difference in a log-probability that rounding can explain, by dtype."""
_DRAFT = {"float32": 0, "bfloat16": 8}
"""The most tokens of a draft. In bfloat16 a step with five tokens for each reply takes 1.3 to 2
times as long as one with a single token. In float32 drafts gain little, and replies are
reproducible to the last bit of their log-probabilities only if each step has one token.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for the decode loop. Sampled ids are below `vocabulary`; each of `end_ids` ends
    a reply. A draft has at most `max_draft_tokens` tokens.

    `shares_rows` says whether several queries on one row need no copy of the row's keys and values.
    """

    model: Any
    tokenizer: Any
    renderer: Renderer
    shape: KVShape
    attention: AttentionLayers
    context_length: int
    vocabulary: int
    end_ids: frozenset[int]
    shares_rows: bool
    max_draft_tokens: int


def load_model(path: Path, *, dtype: str, device: str, context_length: int, at: datetime | None = None) -> LoadedModel:
    """Return a model in evaluation mode on its device. `at` is the moment whose date its chat
    template prints.

    Raises:
        ModelDirectoryError: the files cannot be loaded or do not fit together, or the decode loop
            does not suit the architecture.
        ConfigError: an unknown dtype or device, a context longer than the model's, or
            no context length here or in the model's configuration.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    place = torch_device(device)
    tokenizer, model = _read(path, _DTYPES[dtype])
    model = model.to(place).eval().requires_grad_(False)
    config = model.config.get_text_config()
    max_positions: Any = getattr(config, "max_position_embeddings", None)
    if max_positions is None and not context_length:
        raise ConfigError(f"{path / 'config.json'} does not say how long a context may be; set model.context_length")
    if max_positions is not None and context_length > max_positions:
        raise ConfigError(
            f"model.context_length is {context_length}, but the model of {path} was made for {max_positions}; lower it"
        )
    context: int = context_length or max_positions
    renderer = Renderer(tokenizer, at=at)
    heads = getattr(config, "num_attention_heads", None)
    shape = _kv_shape(path, model, _DTYPES[dtype], place)
    pack_linears(model)
    shares_rows = use_grouped_attention(model) or heads == shape.num_heads
    end_ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        end_ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    loaded_model = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        shape=shape,
        attention=attention_of(path, config, context),
        context_length=context,
        vocabulary=min(model.get_output_embeddings().weight.shape[0], max(tokenizer.get_vocab().values()) + 1),
        end_ids=frozenset(end_ids) | {renderer.end_of_turn},
        shares_rows=shares_rows,
        max_draft_tokens=_DRAFT[dtype],
    )
    _check_decoding(path, loaded_model, _TOLERANCE[dtype])
    return loaded_model


def _read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a directory; an adapter is loaded onto its model.
    Raises `ModelDirectoryError`.
    """
    # The stages of a run show their own progress.
    transformers_logging.disable_progress_bar()
    base = adapter_base(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            base or path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        if base is not None:
            # The adapter stays in the layers; it is not merged into the weights.
            from peft import PeftModel, get_peft_model_state_dict

            peft_model = PeftModel.from_pretrained(model, path)
            with safe_open(path / ADAPTER_WEIGHTS, framework="numpy") as tensors:
                mismatches = set(get_peft_model_state_dict(peft_model)) ^ set(tensors.keys())
            if mismatches:
                raise ValueError(f"adapter and model do not fit: {', '.join(sorted(mismatches)[:3])}")
            model = peft_model.get_base_model()
    # Foreign files may make a library raise anything.
    except Exception as error:
        raise ModelDirectoryError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ModelDirectoryError(
            f"{path} lacks weights or has them in another shape: {', '.join(wrong[:3])}; save it again"
        )
    return tokenizer, model


def attention_of(path: Path, config: Any, context: int) -> AttentionLayers:
    """Return how far the layers of a text configuration look back in a context of `context` tokens.

    Raises `ModelDirectoryError` for layers that are neither full nor sliding attention, and for
    positions that depend on what else is in a batch.
    """
    # With these types Transformers rotates keys by the length of the longest row of the batch, but
    # keys that were stored before keep the rotation of theirs.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    max_positions = getattr(config, "original_max_position_embeddings", None) or getattr(
        config, "max_position_embeddings", None
    )
    for positions in rope.values() if any(isinstance(part, dict) for part in rope.values()) else [rope]:
        limit = positions.get("original_max_position_embeddings") or max_positions
        if positions.get("rope_type") in _BY_LENGTH and limit and context > limit:
            raise ModelDirectoryError(
                f"the model of {path} has positions of type {positions['rope_type']}, which change with the longest "
                f"row of a batch beyond {limit} tokens; set model.context_length to {limit} or less, or serve it with "
                "vLLM"
            )
    # Without a list of layer types, a model with a window has it in all layers.
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    kinds = set(layers)
    if unsupported_kinds := kinds - {"full_attention", "sliding_attention"}:
        raise ModelDirectoryError(
            f"the model of {path} has layers of kind {', '.join(sorted(unsupported_kinds))}, which this backend cannot "
            "decode; serve it with vLLM"
        )
    window = getattr(config, "sliding_window", None)
    if window is None or window >= context or kinds == {"full_attention"}:
        return AttentionLayers(has_both_kinds=len(kinds) == 2)
    near = frozenset(number for number, kind in enumerate(layers) if kind == "sliding_attention")
    return AttentionLayers(window=window, near_layers=near, has_both_kinds=len(kinds) == 2)


@torch.inference_mode()
def _kv_shape(path: Path, model: Any, dtype: torch.dtype, device: torch.device) -> KVShape:
    """Return the shape of the keys and values that the layers store, found by a trial pass, since
    configurations name it in many ways. Raises `ModelDirectoryError` if it differs between layers.
    """
    output = model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=True)
    layers = getattr(getattr(output, CACHE, None), "layers", [])
    key_values = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    shapes = {
        (keys.shape[1], keys.shape[3], values.shape[3]) if keys is not None and values is not None else None
        for keys, values in key_values
    }
    if len(shapes) != 1 or None in shapes:
        raise ModelDirectoryError(
            f"the model of {path} does not keep equal keys and values in all layers, so this backend cannot decode it; "
            "serve it with vLLM"
        )
    ((heads, key_size, value_size),) = (shape for shape in shapes if shape is not None)
    return KVShape(len(key_values), heads, key_size, value_size, dtype, device)


@torch.inference_mode()
def _check_decoding(path: Path, loaded_model: LoadedModel, tolerance: float) -> None:
    """Raise `ModelDirectoryError` if the decode loop fails, or gives other log-probabilities than a
    plain forward pass, as with architectures that have other rules for positions or masks.
    """
    decoder = Decoder(
        loaded_model.model,
        loaded_model.shape,
        loaded_model.attention,
        vocabulary=loaded_model.vocabulary,
        context_length=loaded_model.context_length,
        is_end=lambda tokens, stops, until: False,
        prefix_cache_bytes=0,
        max_draft_tokens=loaded_model.max_draft_tokens,
    )
    prompts = [[(7 * i + 1) % loaded_model.vocabulary for i in range(length)] for length in (4, 9)]
    replies = [
        Reply(prompt_index=number, seed=0, number=0, temperature=0.0, top_p=1.0, limit=3, logprobs=True, stops=())
        for number in range(2)
    ]
    try:
        decoder.decode(DecodeBatch(1, (Row(0, (0,)), Row(1, (1,)))), prompts, replies)
    except (AgentrError, torch.OutOfMemoryError):
        raise
    # The code of a model that reads masks or caches in its own way may raise anything.
    except Exception as error:
        raise ModelDirectoryError(
            f"the model of {path} does not run in this backend ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); serve it with vLLM"
        ) from error
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt + reply.tokens], device=loaded_model.shape.device)
        logits = loaded_model.model(input_ids=ids).logits[0, len(prompt) - 1 : -1, : loaded_model.vocabulary]
        plain = logits.double().log_softmax(dim=-1)[range(len(reply.tokens)), reply.tokens].tolist()
        difference = max(abs(a - b) for a, b in zip(plain, reply.token_logprobs, strict=True))
        if difference > tolerance:
            raise ModelDirectoryError(
                f"the model of {path} gives other results token by token than at once (log-probabilities differ by "
                f"{difference:.2g}), so this backend cannot decode it; serve it with vLLM"
            )
