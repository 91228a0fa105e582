"""Which tokens the layers of a model may look at, as additive masks: all that came before, or the nearest of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MaskInput = Tensor | dict[str, Tensor]
"""What a Transformers model takes as `attention_mask`: one mask, or one for each kind of layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How far the layers of a model look back.

    Args:
        window: the number of tokens, itself included, that a token sees in a layer with a sliding window; None if no
            layer has one that matters.
        by_kind: the model has layers of both kinds and takes one mask for each; otherwise all layers are alike.
    """

    window: int | None = None
    by_kind: bool = False

    def masks(self, full: Tensor, keys: Tensor, queries: Tensor) -> MaskInput:
        """Return what the model takes as `attention_mask`.

        Args:
            full: the additive mask [rows or 1, 1, queries, columns] without any window.
            keys: the position of each column's token [rows or 1, columns].
            queries: the position of each new token [rows or 1, queries].
        """
        if self.window is None:
            return {"full_attention": full, "sliding_attention": full} if self.by_kind else full
        too_far = keys[:, None, None, :] <= queries[:, None, :, None] - self.window
        sliding = full.masked_fill(too_far, -torch.inf)
        return {"full_attention": full, "sliding_attention": sliding} if self.by_kind else sliding
