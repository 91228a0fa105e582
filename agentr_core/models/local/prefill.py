"""Fills the rows of a wave with the keys and values of their prompts.

The part of a row that is in the prefix cache is copied; the rest is computed, each row from its own
column on, together with rows that have about as many tokens left. What several rows share at their
beginning is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentr_core.models.local.kv import CACHE, Block, LayeredKV
from agentr_core.models.local.masks import Attention, MaskInput
from agentr_core.models.local.prefix_cache import PrefixCache, block_names
from agentr_core.models.local.waves import padded_columns

BLOCK = 16
"""The number of tokens in a block of the prefix cache. A prompt that continues a cached one is
computed from the last whole block on, so half a block is computed again on average.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The sizes of forward passes over prompts.

    Args:
        tokens: the most tokens of a pass.
        lengths: the lengths to which its rows are padded, ascending, the last one being the longest
            part of a prompt in a pass. No two neighbours, nor 0 and the first, may be more than 64
            apart, since padding is written behind the longest prompt.
        few_shapes: whether the number of rows is a power of two.
    """

    tokens: int
    lengths: tuple[int, ...]
    few_shapes: bool


ON_CPU = PassSizes(tokens=1024, lengths=(16, 32, 48, 64, 96, 128), few_shapes=True)
"""Few shapes, since on a CPU every new one costs time."""
ON_GPU = PassSizes(tokens=16_384, lengths=(16, 32, 48, 64, 96, *range(128, 2049, 64)), few_shapes=False)
"""Few passes: each costs a GPU the launch of thousands of kernels, whatever their size."""


@dataclass(slots=True)
class _Filling:
    """A row whose columns before `start` are filled. `names` are those of its whole blocks."""

    row: int
    head: Sequence[int]
    names: list[bytes]
    start: int = 0

    @property
    def left(self) -> int:
        return len(self.head) - self.start


class Prefill:
    """Fills buffers with one model. Not thread-safe: one worker owns it.

    `prompt_tokens` counts the tokens of all rows filled so far; of these `cached_tokens` came from
    the cache. `before` is called before each forward pass.
    """

    def __init__(
        self,
        model: Any,
        attention: Attention,
        prefixes: PrefixCache,
        last_position: int,
        sizes: PassSizes,
        before: Callable[[], None],
    ) -> None:
        self._model = model
        self._attention = attention
        self._prefixes = prefixes
        self._last_position = last_position
        self._sizes = sizes
        self._before = before
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def fill(self, buffer: LayeredKV, heads: Sequence[Sequence[int]]) -> None:
        """Write the keys and values of `heads[i]` into row i of a buffer, from column 0 on.

        The buffer needs a few more columns than the longest head has tokens.
        """
        waiting = [_Filling(row, head, block_names(head, BLOCK)) for row, head in enumerate(heads)]
        self.prompt_tokens += sum(map(len, heads))
        while waiting:
            now, waiting = self._without_twins(waiting)
            for filling in now:
                self._restore(buffer, filling)
            self._compute(buffer, [filling for filling in now if filling.left])

    def _without_twins(self, waiting: Sequence[_Filling]) -> tuple[list[_Filling], list[_Filling]]:
        """Return the rows to fill now, and those that wait for a block that one of the first
        computes.
        """
        now: list[_Filling] = []
        later: list[_Filling] = []
        promised: set[bytes] = set()
        for filling in waiting:
            missing = [name for name in filling.names if name not in self._prefixes]
            (later if missing and missing[0] in promised else now).append(filling)
            promised.update(missing)
        return now, later

    def _restore(self, buffer: LayeredKV, filling: _Filling) -> None:
        """Copy the cached blocks at the beginning of a row into the buffer."""
        blocks: list[Block] = []
        for name in filling.names:
            block = self._prefixes.get(name)
            if block is None:
                break
            blocks.append(block)
        if blocks:
            buffer.write(filling.row, blocks)
            filling.start = BLOCK * len(blocks)
            self.cached_tokens += filling.start

    def _compute(self, buffer: LayeredKV, fillings: Sequence[_Filling]) -> None:
        """Compute the rest of each row, and cache its whole blocks."""
        first = {filling.row: filling.start for filling in fillings}
        left = list(fillings)
        while left:
            for length, chunk in _chunks(left, self._sizes):
                self._pass(buffer, chunk, length)
            left = [filling for filling in left if filling.left]
        for filling in fillings:
            for number in range(first[filling.row] // BLOCK, len(filling.names)):
                block = buffer.read(filling.row, number * BLOCK, (number + 1) * BLOCK)
                self._prefixes.put(filling.names[number], block)

    def _pass(self, buffer: LayeredKV, chunk: Sequence[_Filling], length: int) -> None:
        """Compute up to `length` tokens of each row of a chunk."""
        self._before()
        tokens = np.zeros((len(chunk), length), dtype=np.int64)
        for line, filling in enumerate(chunk):
            part = filling.head[filling.start : filling.start + length]
            tokens[line, : len(part)] = part
        device = buffer.shape.device
        starts = torch.tensor([filling.start for filling in chunk], device=device)
        positions = starts[:, None] + torch.arange(length, device=device)
        end = max(filling.start for filling in chunk) + length
        visible = min(padded_columns(end), buffer.columns)
        far, near = buffer.spread([filling.row for filling in chunk], positions, visible)
        # The model without its output layer: a prompt's logits are never read.
        self._model.base_model(
            input_ids=torch.from_numpy(tokens).to(device),
            attention_mask=self._masks(far, near, positions, buffer.shape.dtype),
            # Padding may lie beyond the last position; its output is never read.
            position_ids=positions.clamp(max=self._last_position),
            use_cache=True,
            **{CACHE: buffer.cache},
        )
        for filling in chunk:
            filling.start = min(filling.start + length, len(filling.head))

    def _masks(self, far: Tensor, near: Tensor, positions: Tensor, dtype: torch.dtype) -> MaskInput:
        """Return the masks [rows, 1, length, columns] of a pass over `positions`, whose layers see
        the positions `far` and `near`.
        """
        everything = causal_mask(far, positions, dtype)
        if self._attention.window is None:
            return self._attention.masks(everything, None)
        within = self._attention.within(causal_mask(near, positions, dtype), near, positions)
        return self._attention.masks(everything, within)


def causal_mask(seen: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask [rows, 1, queries, columns]: 0 where a column's position in `seen` [rows or 1,
    columns] is not after the query's in `positions` [rows, queries] and not below 0, else minus
    infinity.
    """
    hidden = (seen[:, None, :] > positions[:, :, None]) | (seen[:, None, :] < 0)
    return torch.zeros(hidden.shape, dtype=dtype, device=seen.device).masked_fill_(hidden, -torch.inf)[:, None]


def _chunks(fillings: Sequence[_Filling], sizes: PassSizes) -> list[tuple[int, list[_Filling]]]:
    """Return groups of rows of one length, each with the length of its pass; no row is padding."""
    by_length: dict[int, list[_Filling]] = {}
    for filling in fillings:
        length = next((size for size in sizes.lengths if size >= filling.left), sizes.lengths[-1])
        by_length.setdefault(length, []).append(filling)
    chunks = []
    for length, rows in sorted(by_length.items()):
        most = sizes.tokens // length
        start = 0
        while start < len(rows):
            size = min(most, len(rows) - start)
            if sizes.few_shapes:
                size = 1 << (size.bit_length() - 1)
            chunks.append((length, rows[start : start + size]))
            start += size
    return chunks
