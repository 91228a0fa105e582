"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_BYTE_TOKENS, _CONTROL, _PLAIN, _BYTE = 256, 3, 1, 6
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3Text"}


def tiny_model(kind: str, vocabulary: int, **options: Any) -> Any:
    """Return a random model of two layers, of a GGUF architecture; its numbers are float32."""
    import torch
    import transformers

    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if kind == "gemma3":
        fields |= {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    config = getattr(transformers, f"{_CLASSES[kind]}Config")(**(fields | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # Norms and biases are ones and zeros in a new model, which would hide what becomes of them.
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.3, 0.2)
    return model.eval()


def write_gguf(
    file: Path,
    kind: str,
    model: Any,
    tokenizer: Any,
    split: str,
    *,
    values: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    packed: tuple[str, ...] = (),
) -> Path:
    """Write a model and its fast tokenizer into a GGUF file.

    Args:
        split: the value of `tokenizer.ggml.pre`.
        values: further values of the architecture.
        tensors: further tensors.
        packed: the tensors that are written as Q8_0.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(file, kind)
    _describe(writer, kind, model.config, values or {})
    _add_vocabulary(writer, kind, tokenizer, split)
    for name, array in [*_tensors(kind, model), *(tensors or {}).items()]:
        if name in packed:
            kind_of = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(array, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _describe(writer: Any, kind: str, config: Any, values: dict[str, Any]) -> None:
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    positions = config.rope_parameters
    writer.add_rope_freq_base(positions.get("full_attention", positions)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if kind in ("gemma3", "qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    for name, value in values.items():
        {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)](name, value)


def _add_vocabulary(writer: Any, kind: str, tokenizer: Any, split: str) -> None:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    user_defined = set(tokenizer.added_tokens_decoder) - control
    types = {**dict.fromkeys(control, _CONTROL), **dict.fromkeys(user_defined, 4)}
    tokens = [by_id[number] for number in range(len(by_id))]
    sentences = kind == "gemma3"
    writer.add_tokenizer_model("llama" if sentences else "gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    is_byte = [sentences and token.startswith("<0x") for token in tokens]
    writer.add_token_types([_BYTE if byte else types.get(n, _PLAIN) for n, byte in enumerate(is_byte)])
    if sentences:
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_add_space_prefix(False)
    else:
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    for name, add in (("eos", writer.add_eos_token_id), ("bos", writer.add_bos_token_id)):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            add(number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(kind: str, model: Any) -> list[tuple[str, np.ndarray[Any, Any]]]:
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[kind.upper()], model.config.num_hidden_layers)
    config, tensors = model.config, []
    for name, parameter in model.named_parameters():
        array = parameter.detach().float().numpy().copy()
        if kind == "gemma3" and "norm" in name:
            array += 1
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind == "llama" and part in name:
                # llama.cpp turns neighbours where Transformers turns halves.
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        tensors.append((str(names.get_name(name, try_suffixes=(".weight", ".bias"))), np.ascontiguousarray(array)))
    return tensors
