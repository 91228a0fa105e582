"""Muon without bfloat16 takes the steps of Torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from base_settings import BaseConfig
from pretrain import FullPrecisionMuon, MuonWithAdamW, make_model, orthogonalized
from words import Words

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def train_optimizer(*, bf16: bool, steps: int = 3, taken_over: dict[str, object] | None = None) -> MuonWithAdamW:
    """Return the optimizer of a small model after some steps."""
    model = make_model(BaseConfig(hidden_size=32, num_hidden_layers=2, head_dim=8, intermediate_size=48), Words(), 0)
    optimizer = MuonWithAdamW(model, learning_rate=0.02, embedding_learning_rate=3e-3, bf16=bf16)
    if taken_over is not None:
        optimizer.load_state_dict(copy.deepcopy(taken_over))  # what it loads it goes on to write to
    ids = torch.arange(40).view(2, 20) * 7 % 64
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    return optimizer


def parameters(optimizer: MuonWithAdamW) -> list[torch.Tensor]:
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def test_its_steps_are_torchs_but_for_rounding() -> None:
    before, torchs, full_precision = (
        parameters(train_optimizer(bf16=bf16, steps=steps)) for bf16, steps in ((True, 0), (True, 3), (False, 3))
    )
    for start, theirs, ours in zip(before, torchs, full_precision, strict=True):
        assert (theirs - ours).norm() < 0.02 * (theirs - start).norm()


def test_a_checkpoint_of_one_continues_in_the_other() -> None:
    checkpoint = train_optimizer(bf16=True).state_dict()
    torchs, full_precision = (
        parameters(train_optimizer(bf16=bf16, steps=1, taken_over=checkpoint)) for bf16 in (True, False)
    )
    fresh = parameters(train_optimizer(bf16=False, steps=1))
    # What the first steps left in the averages shows in the next one.
    theirs, ours, without = (
        torch.cat([tensor.flatten() for tensor in group]) for group in (torchs, full_precision, fresh)
    )
    assert (ours - theirs).norm() < 0.1 * (ours - without).norm()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    product = left.mT @ orthogonalized(matrix, COEFFICIENTS, 5, 1e-7) @ right.mT
    assert ((product.diagonal() > 0.6) & (product.diagonal() < 1.3)).all()
    torch.testing.assert_close(product, torch.diag(product.diagonal()), rtol=0, atol=1e-4)


def test_a_closure_is_refused_and_a_matrix_without_gradient_stays() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = FullPrecisionMuon([matrix])
    optimizer.step()
    assert torch.equal(matrix, torch.ones(2, 3))
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
