"""Attention of the in-process sampler: few queries on many stored keys.

A decode step has one query for each reply, or a few that share a row. There PyTorch's fused kernel
takes four to eight times as long as two plain products on a CPU in bfloat16, and somewhat longer in
float32 (deployments/LOG.md).

Transformers repeats keys and values for each query head as soon as a row has several queries and a
mask: with 8 replies on one row it would write and read all of them once per head in every layer.
Here the queries of the heads that share keys are laid side by side as queries of one head; only the
mask is repeated, which is far smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentr_core.models.local.waves import MAX_WIDTH

NAME = "agentr_grouped"


def use_grouped_attention(model: Any) -> bool:
    """Switch a model to grouped attention where possible; return whether it was switched.

    A model that was loaded with an attention other than Transformers' `sdpa`, such as one with
    capped scores, keeps it.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output of attention [rows, queries, heads, size]; called by the layers of a
    Transformers model.

    Masks are [rows or 1, 1, queries, columns]. Without a mask, or if the model has a position bias
    or capped scores, Transformers' own function is called. Stored keys and values that lie in one
    piece are read fastest.
    """
    groups = query.shape[1] // key.shape[1]
    biased = options.get("position_bias") is not None or options.get("softcap") is not None
    if attention_mask is None or attention_mask.shape[1] != 1 or biased:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended
    rows, heads, queries, size = query.shape
    # Query heads that share keys lie side by side, so a reshape is all it takes.
    folded = query.reshape(rows, key.shape[1], groups * queries, size)
    mask = attention_mask.repeat(1, 1, groups, 1)
    # A decode step; Transformers' own masks, of truth values, belong to plain forward passes.
    if queries <= MAX_WIDTH and mask.is_floating_point() and query.device.type == "cpu":
        output = _plain(folded, key, value, mask, size**-0.5 if scaling is None else scaling)
    else:
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, queries, value.shape[3]).transpose(1, 2).contiguous(), None


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    # In bfloat16, softmax of 16-bit scores would lose what the fused kernel keeps.
    scores = torch.matmul(query, key.transpose(-1, -2)).float()
    weights = scores.mul_(scaling).add_(mask).softmax(dim=-1)
    return torch.matmul(weights.to(value.dtype), value)
