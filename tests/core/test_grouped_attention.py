"""Attention without copies for each query head gives what Transformers' own gives with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentr_core.models.local.decoding import grouped_attention


@pytest.mark.parametrize(("heads", "shared"), [(8, 2), (8, 1), (4, 4)])
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("masked_rows", [1, 2])
def test_it_is_the_attention_of_transformers(heads: int, shared: int, queries: int, masked_rows: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, heads, queries, 16)
    key, value = torch.randn(2, shared, 20, 16), torch.randn(2, shared, 20, 24)
    mask = torch.zeros(masked_rows, 1, queries, 20).masked_fill(
        torch.rand(masked_rows, 1, queries, 20) < 0.4, -torch.inf
    )
    mask[..., 0] = 0
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    ours, _ = grouped_attention(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape == (2, queries, heads, 24)
    torch.testing.assert_close(ours, theirs)


def test_without_a_mask_it_is_causal() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    ours, _ = grouped_attention(module, query, key, key, None, scaling=0.3)
    mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]
    expected, _ = grouped_attention(module, query, key, key, mask, scaling=0.3)
    torch.testing.assert_close(ours, expected)
