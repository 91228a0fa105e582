"""The optimizer of the base model: Muon for the matrices of the layers, AdamW for embeddings and
norms.

Muon makes each update of a matrix nearly orthogonal, so that rare directions learn as fast as
common ones. It reached the same loss with about half the tokens that AdamW alone took (numbers in
deployments/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch


class FullPrecisionMuon(torch.optim.Muon):
    """Torch's Muon with its Newton-Schulz iteration in the precision of the gradients.

    Torch casts every matrix to bfloat16, and a processor without bfloat16 then spends most of a
    training step in the optimizer (deployments/LOG.md).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; a closure is not supported."""
        if closure is not None:
            raise ValueError("FullPrecisionMuon takes no closure")
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                average = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(average, group["momentum"]) if group["nesterov"] else average
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                taller = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * taller)


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return a matrix of the same shape and singular vectors, with singular values near 1: the
    quintic Newton-Schulz iteration of Muon (Jordan et al., 2024).
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found: torch.Tensor = matrix.mT if tall else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.mT if tall else found


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step as one: Muon (matrices of the layers) and AdamW (embeddings, norms).

    Args:
        model: all its parameters that need a gradient are optimised.
        learning_rate: of Muon; an update is an orthogonal matrix times this, so the scale is not
            AdamW's.
        embedding_learning_rate: of AdamW.
        bf16: whether Muon computes in bfloat16, as Torch's does, or in the gradients' precision.
    """

    def __init__(
        self, model: torch.nn.Module, *, learning_rate: float, embedding_learning_rate: float, bf16: bool
    ) -> None:
        muon = torch.optim.Muon if bf16 else FullPrecisionMuon
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            in_layers = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if in_layers else others).append(parameter)
        super().__init__([*matrices, *others], {})
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": muon(matrices, lr=learning_rate, momentum=0.95, weight_decay=0.01),
            "adamw": torch.optim.AdamW(others, lr=embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        }
        # The same group objects as the parts': a scheduler that sets a learning rate here sets it
        # there.
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter once; a closure is not supported."""
        if closure is not None:
            raise ValueError("MuonWithAdamW takes no closure")
        for part in self._parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both parts by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both parts."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]
