"""Key/value caches of fixed rows and growing columns, written in place.

Transformers' own growing cache copies itself whole at every token, and its static cache gives all
rows one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import create_causal_mask

CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
"""The name by which models take and return their cache; Transformers 5.24 changed it."""
Block = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys and values of some tokens in far layers, and of the last of these in near layers: each
[layers, heads, tokens, head size].
"""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of what a model's layers store for a token, equal for all layers."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


class KVBuffer:
    """Keys and values [layers, rows, heads, columns, head size] and the window that a forward pass
    reads and writes.

    Before a forward pass, `window` or `spread` names the columns it writes and those it may attend
    to. Columns that hold no token of a row must be masked by the caller; they hold finite numbers.
    """

    _rows: slice | Tensor
    _lines: Tensor | None
    _written: int | Tensor
    _seen: slice | Tensor

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._memory, self._other = self._allocate(0), self._allocate(0)
        self.reset(0, 0)

    def reset(self, rows: int, columns: int) -> None:
        """Discard all contents and change the size. Memory is kept: fresh pages cost more than a
        decode step.
        """
        tokens = self.shape.layers * rows * self.shape.heads * columns
        if self._memory[0].numel() < tokens * self.shape.key_size:
            self._memory = self._allocate(tokens)
        dimensions = (self.shape.layers, rows, self.shape.heads, columns)
        keys, values = self._memory
        self.keys = keys[: tokens * self.shape.key_size].view(*dimensions, self.shape.key_size)
        self.values = values[: tokens * self.shape.value_size].view(*dimensions, self.shape.value_size)
        self.window(0, 0)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def columns(self) -> int:
        return self.keys.shape[3]

    def window(self, start: int, visible: int, first: int = 0) -> None:
        """Let the next forward pass, over all rows, write from column `start` on and see the
        columns from `first` up to `visible`.
        """
        self._rows, self._lines = slice(None), None
        self._written, self._seen = start, slice(first, visible)
        self.start, self.visible = start, visible

    def spread(self, rows: Sequence[int], columns: Tensor, seen: Tensor | int) -> None:
        """Let the next forward pass, over `rows`, write each row to its own `columns` [rows,
        tokens].

        Each row sees its columns `seen` [rows, columns], where numbers below 0 stand for none; or,
        if `seen` is one number, all columns up to that.
        """
        self._lines = torch.tensor(rows, device=self.shape.device)[:, None]
        # Adjacent rows are read in place; indexing would copy all that is visible.
        together = rows[-1] - rows[0] == len(rows) - 1 and sorted(rows) == list(rows)
        self._rows = slice(rows[0], rows[-1] + 1) if together else self._lines[:, 0]
        self._written, self._seen = columns, slice(0, seen) if isinstance(seen, int) else seen.clamp(min=0)
        self.start, self.visible = 0, seen if isinstance(seen, int) else seen.shape[1]

    def grow(self, columns: int) -> None:
        """Make room for more columns, keeping what is stored."""
        keys, values = self.keys, self.values
        # Rows stay in one piece, so they move to another memory; the two take turns.
        self._memory, self._other = self._other, self._memory
        self.reset(keys.shape[1], columns)
        self.keys[:, :, :, : keys.shape[3]] = keys
        self.values[:, :, :, : values.shape[3]] = values

    def keep(self, rows: Sequence[int], size: int, used: int) -> list[int]:
        """Shrink to `size` rows that include the given ones, and return the new number of each.

        Rows inside the new size stay; the others move into the gaps. Only the first `used` columns
        are moved.
        """
        staying = {row for row in rows if row < size}
        gaps = iter(row for row in range(size) if row not in staying)
        places = []
        for row in rows:
            place = row if row < size else next(gaps)
            if place != row:
                self.keys[:, place, :, :used] = self.keys[:, row, :, :used]
                self.values[:, place, :, :used] = self.values[:, row, :, :used]
            places.append(place)
        self.keys, self.values = self.keys[:, :size], self.values[:, :size]
        return places

    def read(self, row: int, columns: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of some columns of a row: two tensors [layers, heads, columns, head
        size].
        """
        return self.keys[:, row, :, columns].clone(), self.values[:, row, :, columns].clone()

    def write(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store what `read` returned."""
        stop = start + keys.shape[2]
        self.keys[:, row, :, start:stop] = keys
        self.values[:, row, :, start:stop] = values

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens [rows, heads, tokens, head size]; return all that
        are visible.
        """
        return self._exchange(self.keys[layer], keys), self._exchange(self.values[layer], values)

    def _exchange(self, stored: Tensor, new: Tensor) -> Tensor:
        """Store new tokens in a layer, and return what is visible of it."""
        if isinstance(self._written, int):
            stored[self._rows, :, self._written : self._written + new.shape[2]] = new
        else:
            stored[self._lines, :, self._written] = new.transpose(1, 2)
        if isinstance(self._seen, slice):
            return stored[self._rows, :, self._seen]
        return stored[self._lines, :, self._seen].transpose(1, 2)

    def gather(self, columns: Tensor) -> None:
        """Move columns to the front: column j of row i becomes the former column `columns[i, j]`;
        `columns` is [rows, at most all columns].
        """
        rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
        for numbers in (self.keys, self.values):
            moved = numbers[:, rows, :, columns]
            numbers[:, : columns.shape[0], :, : columns.shape[1]] = moved.permute(2, 0, 3, 1, 4)

    def _allocate(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return memory for the keys and the values of so many tokens of a head."""
        # Zeros, not uninitialised memory: a masked NaN would still spoil the product of weights and
        # values.
        sizes = (self.shape.key_size, self.shape.value_size)
        keys, values = (torch.zeros(tokens * size, dtype=self.shape.dtype, device=self.shape.device) for size in sizes)
        return keys, values


class LayeredKV:
    """The keys and values of all layers of a model: `far` for layers where a token sees all tokens
    before it, `near` for those where it sees the last `window` tokens, itself included.

    While prompts are filled in, both have the same columns. `settle` keeps only the last tokens of
    each prompt in `near`, which then has `shift` columns fewer than `far` before the first column
    of a reply.
    """

    def __init__(self, shape: KVShape, near: frozenset[int], window: int | None) -> None:
        self.shape = shape
        self._before = 0 if window is None else window - 1
        self.far = KVBuffer(replace(shape, layers=shape.layers - len(near)))
        self.near = KVBuffer(replace(shape, layers=len(near)))
        self.shift = 0
        far_numbers, near_numbers = count(), count()
        self.cache = Cache(
            layers=[
                _Layer(self.near, next(near_numbers)) if number in near else _Layer(self.far, next(far_numbers))
                for number in range(shape.layers)
            ]
        )

    def reset(self, rows: int, columns: int) -> None:
        """Discard all contents and change the size."""
        self.shift = 0
        self.far.reset(rows, columns)
        self.near.reset(rows, columns)

    @property
    def rows(self) -> int:
        return self.far.rows

    @property
    def columns(self) -> int:
        return self.far.columns

    def settle(self, prompts: Sequence[int], base: int, window: int) -> Tensor:
        """End the filling of prompts, and return the positions of the tokens that `near` keeps
        [rows, columns]; below 0 for none.

        Row i has `prompts[i]` tokens; all end before column `base`.
        """
        kept = min(window - 1, base)
        self.shift = base - kept
        positions = torch.tensor(prompts, device=self.shape.device)[:, None] - kept
        positions = positions + torch.arange(kept, device=self.shape.device)
        self.near.gather(positions.clamp(min=0))
        return positions

    def grow(self, columns: int) -> None:
        """Make room for more columns, keeping what is stored."""
        self.far.grow(columns)
        self.near.grow(columns)

    def keep(self, rows: Sequence[int], size: int, used: int) -> list[int]:
        """Shrink to `size` rows that include the given ones, and return their new numbers; only the
        first `used` columns are in use.
        """
        self.near.keep(rows, size, used - self.shift)
        return self.far.keep(rows, size, used)

    def spread(self, rows: Sequence[int], positions: Tensor, visible: int) -> tuple[Tensor, Tensor]:
        """Let the next forward pass, over some rows, fill in prompts at `positions` [rows, tokens],
        consecutive in each row; return the positions that far and near layers then see [rows or 1,
        columns], below 0 for none.
        """
        device = self.shape.device
        everything = torch.arange(visible, device=device)[None]
        self.far.spread(rows, positions, visible)
        length = self._before + positions.shape[1]
        if length >= visible:
            self.near.spread(rows, positions, visible)
            return everything, everything
        seen = positions[:, :1] - self._before + torch.arange(length, device=device)
        self.near.spread(rows, positions, seen)
        return everything, seen

    def read(self, row: int, start: int, stop: int) -> Block:
        """Return a copy of the tokens of a prompt from `start` up to `stop`, before `settle`; in
        near layers, only of those that a later token may see.
        """
        first = max(start, stop - self._before)
        return *self.far.read(row, slice(start, stop)), *self.near.read(row, slice(first, stop))

    def read_reply(self, row: int, columns: Sequence[int], near: Sequence[int]) -> Block:
        """Return, as `read` does but after `settle`, a copy of the tokens in these columns of far
        layers; `near` are their columns in near layers, before the shift.
        """
        device = self.shape.device
        last = torch.tensor(near[max(0, len(near) - self._before) :], dtype=torch.long, device=device) - self.shift
        return *self.far.read(row, torch.tensor(columns, device=device)), *self.near.read(row, last)

    def write(self, row: int, blocks: Sequence[Block]) -> None:
        """Store one or more blocks that `read` returned, at the beginning of a row."""
        keys, values = (torch.cat([block[part] for block in blocks], dim=2) for part in (0, 1))
        self.far.write(row, 0, keys, values)
        size = blocks[0][0].shape[2]
        for number in range(max(0, len(blocks) - -(-self._before // size)), len(blocks)):
            _, _, keys, values = blocks[number]
            self.near.write(row, (number + 1) * size - keys.shape[2], keys, values)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """The part of the buffer that a layer of a Transformers model sees."""

    def __init__(self, buffer: KVBuffer, number: int) -> None:
        super().__init__()
        self._buffer = buffer
        self._number = number

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self._buffer.update(self._number, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffer is allocated before the first pass."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffer.visible, 0

    def get_seq_length(self) -> int:
        return self._buffer.start

    def get_max_length(self) -> int:
        return self._buffer.columns
