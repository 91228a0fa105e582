"""Additive attention masks: tokens see all tokens before them, or only the nearest ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MaskInput = Tensor | dict[str, Tensor]
"""The `attention_mask` of a Transformers model: one mask, or one for each kind of layer."""
_GRAIN = 16
"""The number of columns by which the part in reach of a window moves on, so that few shapes
occur.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How far the layers of a model look back.

    Args:
        window: the number of tokens, itself included, that a token sees in a near layer; None
            without such layers.
        near: the numbers of the layers with a sliding window shorter than the context; the others
            are far layers.
        by_kind: the model has layers of both kinds and takes one mask for each; otherwise all
            layers are alike.
    """

    window: int | None = None
    near: frozenset[int] = frozenset()
    by_kind: bool = False

    def masks(self, far: Tensor, near: Tensor | None) -> MaskInput:
        """Return the model's `attention_mask`, made of the masks of its far and its near layers."""
        if self.by_kind:
            return {"full_attention": far, "sliding_attention": far if near is None else near}
        return far if near is None else near

    def span(self, end: int, width: int) -> tuple[int, int]:
        """Return the first column that near layers need in a step of `width` slots, and the one
        after the last.

        `end` is the column after those of the step.
        """
        first = 0 if self.window is None else max(0, end - self.window * width)
        return first // _GRAIN * _GRAIN, -(-end // _GRAIN) * _GRAIN

    def within(self, mask: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        """Return a mask [rows, 1, queries, columns] that also hides the columns before the window.

        `keys` are the positions of the columns' tokens [rows, columns], `queries` those of the new
        tokens [rows, queries].
        """
        assert self.window is not None
        return mask.masked_fill(keys[:, None, None, :] <= queries[:, None, :, None] - self.window, -torch.inf)


class View:
    """The part of one buffer that the slots of a wave see: a mask [rows, 1, width, columns], and
    the columns' positions.

    Column c of the wave is column c - `shift` of the buffer.
    """

    def __init__(self, mask: Tensor, positions: Tensor, shift: int) -> None:
        self.mask = mask
        self.positions = positions
        self._shift = shift

    def open(self, column: int, positions: Tensor) -> None:
        """Let each slot see the column that it writes in this step; the first one is `column`."""
        start = column - self._shift
        stop = start + self.mask.shape[2]
        self.mask[:, 0, :, start:stop].diagonal(dim1=1, dim2=2).zero_()
        self.positions[:, start:stop] = positions

    def widen(self, more: int) -> None:
        """Add `more` columns, as the buffer did."""
        self.mask = torch.nn.functional.pad(self.mask, (0, more), value=-torch.inf)
        self.positions = torch.nn.functional.pad(self.positions, (0, more))

    def take(self, rows: Tensor) -> None:
        """Keep copies of the given rows, in their order."""
        self.mask, self.positions = self.mask[rows], self.positions[rows]
