"""Attention for training on a CPU: scores outside a layer's small window are not computed.

Transformers computes all scores of a row and masks them, which is wasted work for a window of a few
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "agentr_training"
_SMALL_WINDOW = 16


def use_training_attention(model: Any) -> None:
    """Switch a model on the CPU to this attention, unless it was loaded with an implementation
    other than Transformers' `sdpa`.
    """
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(register())


def register() -> str:
    """Register `attend` with Transformers, and return its name there."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output of attention [rows, tokens, heads, head size], and None for the weights;
    called by the layers of a Transformers model.

    `query` is [rows, heads, tokens, head size]; `key` and `value` have the same shape, or fewer
    heads, each shared by several query heads. Masks are boolean [rows or 1, 1, tokens, tokens];
    without one, attention is causal. Layers without a small window, and calls with any option that
    is not supported here, are passed on to Transformers' `sdpa`.
    """
    tokens, window = query.shape[2], options.get("sliding_window") or 0
    unsupported = [name for name in ("position_bias", "softcap", "s_aux") if options.get(name) is not None]
    is_additive = attention_mask is not None and attention_mask.dtype != torch.bool
    if not 0 < window <= _SMALL_WINDOW or dropout or unsupported or is_additive or key.shape[2] != tokens:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return result
    num_repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, num_repeats), repeat_kv(value, num_repeats)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return _windowed_attention(query, key, value, attention_mask, min(window, tokens)).transpose(1, 2), None


def _windowed_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int) -> Tensor:
    tokens = query.shape[2]
    padding = (0, 0, window - 1, 0)
    keys, values = torch.nn.functional.pad(key, padding), torch.nn.functional.pad(value, padding)
    # One position of the window after another, from the oldest token to the current one.
    scores = torch.stack([(query * keys[:, :, offset : offset + tokens]).sum(-1) for offset in range(window)], dim=-1)
    age = torch.arange(window - 1, -1, -1, device=query.device)
    position = torch.arange(tokens, device=query.device)[:, None] - age
    hidden = position < 0
    if mask is not None:
        index = position.clamp(min=0).expand(*mask.shape[:2], tokens, window)
        hidden = hidden | ~mask.gather(-1, index)
    # A padding token sees nothing: with minus infinity everywhere its softmax would be NaN, which
    # the products of later layers would carry to all tokens.
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return torch.stack(
        [weights[..., offset, None] * values[:, :, offset : offset + tokens] for offset in range(window)]
    ).sum(0)
