"""The optimizer of the base model: Muon for the matrices of the layers, AdamW for embeddings and
norms.

Muon makes each update of a matrix nearly orthogonal, so that rare directions learn as fast as
common ones. It reached the same loss with about half the tokens that AdamW alone took (numbers in
deployments/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step as one: Muon (matrices of the layers) and AdamW (embeddings, norms).

    Args:
        model: all its parameters that need a gradient are optimised.
        learning_rate: of Muon; an update is an orthogonal matrix times this, so the scale is not
            AdamW's.
        embedding_learning_rate: of AdamW.
    """

    def __init__(self, model: torch.nn.Module, *, learning_rate: float, embedding_learning_rate: float) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            in_layers = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if in_layers else others).append(parameter)
        super().__init__([*matrices, *others], {})
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=learning_rate, momentum=0.95, weight_decay=0.01),
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
