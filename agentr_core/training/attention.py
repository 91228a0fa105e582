"""Attention for training on a CPU: scores outside a layer's small window are not computed, and
those of short rows come from plain products.

Transformers computes all scores of a row and masks them, which is wasted work for a window of a few
tokens; and its fused kernel is slower here than plain products, in bfloat16 for rows of fewer than
640 tokens (deployments/LOG.md).
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
_MOST_SCORES = 1 << 26
"""The most scores of a row, in all heads and layers, that are kept for the backward pass, about 400
MB: 2,048 tokens in four heads of four layers. A model with 30 layers of nine heads would keep 1.6
GB of 1,024 tokens, and is no faster for it."""
_SHORT_ROW = 640
"""The most tokens of a row in a 16-bit format for which plain products are faster."""


def use_training_attention(model: Any) -> None:
    """Switch a model on the CPU to this attention, unless it was loaded with another than
    Transformers' `sdpa`.
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
    """Return the output of attention [rows, tokens, heads, head size]; called by the layers of a
    Transformers model.

    `query` is [rows, heads, tokens, head size]; `key` and `value` have the same shape, or fewer
    heads, which the query heads share. Masks are [rows or 1, 1, tokens, tokens], of truth values;
    without one, attention is causal. What else a model may ask for is left to Transformers.
    """
    tokens, window = query.shape[2], options.get("sliding_window") or 0
    windowed = 0 < window <= _SMALL_WINDOW
    unknown = [name for name in ("position_bias", "softcap", "s_aux") if options.get(name) is not None]
    is_additive = attention_mask is not None and attention_mask.dtype != torch.bool
    many = query.shape[1] * tokens**2 * module.config.num_hidden_layers > _MOST_SCORES
    # Autocast leaves queries and keys in float32 where a model normalises them.
    long = tokens > _SHORT_ROW and value.dtype != torch.float32
    large = not windowed and (many or long)
    if dropout or unknown or is_additive or large or key.shape[2] != tokens:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return attended
    shared = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, shared), repeat_kv(value, shared)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if windowed:
        output = _nearest(query, key, value, attention_mask, min(window, tokens))
    else:
        rows, heads, tokens, _ = query.shape
        # Otherwise autocast would copy the bias of each head to the format of the product.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if attention_mask is None:
            attention_mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=query.device).tril()
        hidden = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, _lowest_score(query))
        bias = hidden.expand(rows, heads, tokens, tokens).flatten(0, 1)
        scores = torch.baddbmm(bias, query.flatten(0, 1), key.transpose(2, 3).flatten(0, 1))
        output = _weights(scores.view(rows, heads, tokens, tokens)) @ value
    return output.transpose(1, 2), None


def _nearest(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int) -> Tensor:
    tokens = query.shape[2]
    before = (0, 0, window - 1, 0)
    keys, values = torch.nn.functional.pad(key, before), torch.nn.functional.pad(value, before)
    # One position of the window after another, from the oldest token to the current one.
    scores = torch.stack([(query * keys[:, :, offset : offset + tokens]).sum(-1) for offset in range(window)], dim=-1)
    age = torch.arange(window - 1, -1, -1, device=query.device)
    position = torch.arange(tokens, device=query.device)[:, None] - age
    missing = position < 0
    if mask is not None:
        clamped = position.clamp(min=0).expand(*mask.shape[:2], tokens, window)
        missing = missing | ~mask.gather(-1, clamped)
    weights = _weights(scores.masked_fill(missing, _lowest_score(scores)))
    return torch.stack(
        [weights[..., offset, None] * values[:, :, offset : offset + tokens] for offset in range(window)]
    ).sum(0)


def _lowest_score(numbers: Tensor) -> float:
    """Return the score of what a token does not see. Padding sees nothing, and minus infinity alone
    would make it NaN, which the products of later layers would carry to all tokens.
    """
    return torch.finfo(numbers.dtype).min


def _weights(scores: Tensor) -> Tensor:
    # In 16 bits, too, it is computed in float32 and rounded once.
    return scores.softmax(dim=-1)
