"""The training's own attention gives what Transformers' does."""

from __future__ import annotations

import pytest
import torch
from words import Words

from agentr_core.base_model.pretrain import make_model
from agentr_core.recipes import BaseConfig


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
    found = []
    for own in (True, False):
        model = make_model(config, Words(), seed=0)
        assert model.config.num_key_value_heads == (key_heads or 4)
        if not own:
            model.set_attn_implementation("eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
