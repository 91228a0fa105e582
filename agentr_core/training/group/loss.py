"""The clipped policy-gradient loss on sampled tokens, as pure functions of flat tensors.

It equals the loss of TRL's GRPOTrainer for `loss_type` dapo, grpo and dr_grpo. The weights of
tokens say how they are averaged, so that a step may be split into forward passes in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agentr_core.recipes.grpo import LossType


class Surrogate(NamedTuple):
    """The loss of some tokens, and unweighted sums over them."""

    loss: Tensor
    clipped: Tensor
    """The number of tokens whose ratio was beyond its limit, so that they have no gradient."""
    sampler_kl: Tensor
    """The KL divergence from the policy that sampled, in nats."""
    kl: Tensor
    """The KL divergence to the reference, in nats; 0 without a reference."""


def token_weights(
    lengths: Sequence[int], *, wholes: Sequence[int] | None = None, loss_type: LossType, most: int
) -> list[float]:
    """Return for each episode the weight of its tokens in the sum that is the loss of an optimizer
    step.

    Args:
        lengths: the number of sampled tokens of each episode, or of each part of one.
        wholes: the number of sampled tokens of the whole episode that each is a part of: it counts
            as that fraction of an episode. None: each is whole.
        most: the most sampled tokens that an episode may have, for `dr_grpo`.
    """
    if loss_type == "dapo":
        return [1 / sum(lengths)] * len(lengths)
    wholes = lengths if wholes is None else wholes
    episodes = sum(length / whole for length, whole in zip(lengths, wholes, strict=True))
    return [1 / (episodes * (whole if loss_type == "grpo" else most)) for whole in wholes]


def surrogate(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    reference: Tensor | None = None,
    beta: float = 0.0,
) -> Surrogate:
    """Return `sum(weights * -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A))`, where
    `r = exp(logprobs - sampled_logprobs)`, plus `beta` times the KL divergence to the reference.
    With `delta`, the first r is at most `delta`, so that a token of negative advantage costs at
    most `delta * -A` however likely it became: the dual clip of PPO (arXiv 1912.09729).

    All tensors have the shape [tokens]; log-probabilities are natural. Divergences are estimated as
    `exp(d) - d - 1` for a difference d (Schulman's k3).
    """
    difference = logprobs - sampled_logprobs
    ratio = difference.exp()
    limited = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    losses = -torch.minimum(bounded * advantages, limited * advantages)
    clipped = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    clipped |= (bounded < ratio) & (advantages < 0)
    kl = torch.zeros_like(logprobs) if reference is None else divergence(reference - logprobs)
    losses = losses + beta * kl
    return Surrogate(
        loss=(weights * losses).sum(),
        clipped=clipped.sum().detach(),
        sampler_kl=divergence(difference).sum().detach(),
        kl=kl.sum().detach(),
    )


def divergence(difference: Tensor) -> Tensor:
    """Return the k3 estimate of a KL divergence from the differences of log-probabilities, each at
    least 0.
    """
    return difference.exp() - difference - 1
