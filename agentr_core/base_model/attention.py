"""Attention for training on a CPU: scores outside a layer's small window are not computed.

Transformers computes all scores of a row and masks them, which is wasted work for a window of a few
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.qwen3.modeling_qwen3 import repeat_kv

NAME = "agentr_training"


def register() -> str:
    """Register `attend` with Transformers, and return its name there."""
    AttentionInterface.register(NAME, attend)
    return NAME


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Return causal attention over rows that start at their first token: [rows, tokens, heads, head
    size].

    `query` is [rows, heads, tokens, head size]; `key` and `value` have the same shape, or fewer
    heads, which the query heads share. Masks are ignored: padding must come last.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, shared), repeat_kv(value, shared)
    query = query * query.shape[3] ** -0.5
    if module.sliding_window is None:
        found = _causal(query, key, value)
    else:
        found = _nearest(query, key, value, module.sliding_window)
    return found.transpose(1, 2), None


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # Faster than the fused kernel on a CPU, at up to 2,048 tokens.
    ahead = torch.full((query.shape[2],) * 2, -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    return _weights(query @ key.transpose(2, 3) + ahead) @ value


def _nearest(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    tokens = query.shape[2]
    before = (0, 0, window - 1, 0)
    keys, values = torch.nn.functional.pad(key, before), torch.nn.functional.pad(value, before)
    # One position of the window after another, from the oldest token to the current one.
    scores = torch.stack([(query * keys[:, :, place : place + tokens]).sum(-1) for place in range(window)], dim=-1)
    age = torch.arange(window - 1, -1, -1, device=query.device)
    missing = age > torch.arange(tokens, device=query.device)[:, None]
    weights = _weights(scores.masked_fill(missing, -torch.inf))
    return torch.stack(
        [weights[..., place, None] * values[:, :, place : place + tokens] for place in range(window)]
    ).sum(0)


def _weights(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
