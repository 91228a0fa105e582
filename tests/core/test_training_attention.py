"""The training's own attention gives what Transformers' does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from base_settings import BaseConfig
from pretrain import make_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from words import Words

from agentr_core.training import attention
from agentr_core.training.attention import attend


@pytest.mark.parametrize(("tokens", "key_heads"), [(1, 0), (3, 0), (4, 0), (50, 0), (50, 2), (50, 1)])
def test_loss_and_gradients_are_those_of_eager_attention(tokens: int, key_heads: int) -> None:
    config = BaseConfig(
        hidden_size=32,
        num_hidden_layers=4,
        head_dim=8,
        num_key_value_heads=key_heads,
        intermediate_size=32,
        sliding_window=4,
    )
    ids = torch.arange(2 * tokens).view(2, tokens) * 7 % 64
    results = []
    for is_ours in (True, False):
        model = make_model(config, Words(), seed=0)
        assert model.config.num_key_value_heads == (key_heads or 4)
        if not is_ours:
            model.set_attn_implementation("eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def packing_mask(*lengths: int, rows: int = 1) -> torch.Tensor:
    """Return the mask of a row of samples, none of which sees another."""
    sample = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    mask = (sample[:, None] == sample).tril()
    return mask[None, None].expand(rows, 1, -1, -1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_that_sees_nothing_spoils_no_token(side: str, dtype: torch.dtype) -> None:
    config = BaseConfig(hidden_size=32, num_hidden_layers=4, head_dim=8, intermediate_size=32, sliding_window=4)
    ids = torch.arange(2 * 20).view(2, 20) * 7 % 64
    real = torch.ones_like(ids)
    real[1, slice(None, 12) if side == "left" else slice(8, None)] = 0
    results = []
    for is_ours in (True, False):
        model = make_model(config, Words(), seed=0).to(dtype)
        if not is_ours:
            model.set_attn_implementation("sdpa")
        logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits[real.bool()]
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("masks", [1, 2])
def test_samples_of_a_row_do_not_see_each_other(window: int, key_heads: int, masks: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 24, 8, requires_grad=True) for heads in (4, key_heads, key_heads))
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4 // key_heads)
    mask = packing_mask(9, 1, 14, rows=masks).triu(1 - window)
    ours, _ = attend(module, query, key, value, mask, scaling=0.3, sliding_window=window)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    results = [[out, *torch.autograd.grad(out.square().sum(), [query, key, value])] for out in (ours, theirs)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.5},
        {"position_bias": torch.zeros(1, 4, 6, 6)},
        {"attention_mask": torch.zeros(1, 1, 6, 6)},
        {"key": torch.zeros(1, 4, 9, 8), "value": torch.zeros(1, 4, 9, 8)},
        {"sliding_window": 17},
        {"sliding_window": None},
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(1, 4, 6, 8) for name in ("query", "key", "value")}
    arguments |= {"attention_mask": None, "sliding_window": 4}
    theirs = Mock(return_value=("theirs", None))
    monkeypatch.setattr(attention, "sdpa_attention_forward", theirs)
    module = SimpleNamespace()
    assert attend(module, **arguments)[0].shape == (1, 6, 4, 8)
    theirs.assert_not_called()
    attend(module, **{**arguments, **changes})
    theirs.assert_called_once()
