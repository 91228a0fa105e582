"""Key/value caches of fixed rows and growing columns, written in place.

Transformers' own growing cache copies itself whole at every token, and its static cache gives all
rows one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model's layers store for a token: equal for all layers."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


class KVBuffer:
    """Keys and values [layers, rows, heads, columns, head size] and the window that a forward pass
    reads and writes.

    Before a forward pass, `window` names its rows, the columns it writes and those it may attend
    to. Columns that hold no token of a row must be masked by the caller; they are finite numbers.
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._key_memory, self._value_memory = self._allocate(0), self._allocate(0)
        self.reset(0, 0)

    def reset(self, rows: int, columns: int) -> None:
        """Forget everything and take another size. Memory is kept: fresh pages cost more than a
        decode step.
        """
        tokens = self.shape.layers * rows * self.shape.heads * columns
        if self._key_memory.numel() < tokens * self.shape.key_size:
            self._key_memory = self._allocate(tokens * self.shape.key_size)
            self._value_memory = self._allocate(tokens * self.shape.value_size)
        dimensions = (self.shape.layers, rows, self.shape.heads, columns)
        self.keys = self._key_memory[: tokens * self.shape.key_size].view(*dimensions, self.shape.key_size)
        self.values = self._value_memory[: tokens * self.shape.value_size].view(*dimensions, self.shape.value_size)
        self.window(None, 0, 0)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def columns(self) -> int:
        return self.keys.shape[3]

    def window(self, rows: Sequence[int] | None, start: int, visible: int, first: int = 0) -> None:
        """Let the next forward pass write from column `start` on and see the columns from `first`
        up to `visible`.

        `rows` are the ascending indices of its rows; None means all of them.
        """
        self.first, self.start, self.visible = first, start, visible
        self._rows: slice | Tensor
        if rows is None:
            self._rows = slice(None)
        elif rows[-1] - rows[0] == len(rows) - 1:
            # A slice is read in place; an index would copy all that is visible.
            self._rows = slice(rows[0], rows[-1] + 1)
        else:
            self._rows = torch.tensor(rows, device=self.shape.device)

    def grow(self, columns: int) -> None:
        """Make room for more columns, keeping what is stored."""
        keys, values = self.keys, self.values
        self._key_memory, self._value_memory = self._allocate(0), self._allocate(0)
        self.reset(keys.shape[1], columns)
        self.keys[:, :, :, : keys.shape[3]] = keys
        self.values[:, :, :, : values.shape[3]] = values

    def keep(self, rows: Sequence[int], size: int, used: int) -> list[int]:
        """Shrink to `size` rows that hold the given rows, and return for each of them where it is
        now.

        Rows that lie inside the new size stay; the others move into the gaps. Only `used` columns
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

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return a copy of a row's columns: two tensors [layers, heads, stop - start, head
        size].
        """
        return self.keys[:, row, :, start:stop].clone(), self.values[:, row, :, start:stop].clone()

    def write(self, row: int, start: int, block: tuple[Tensor, Tensor]) -> None:
        """Store what `read` returned."""
        stop = start + block[0].shape[2]
        self.keys[:, row, :, start:stop] = block[0]
        self.values[:, row, :, start:stop] = block[1]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens [rows, heads, tokens, head size]; return all that
        are visible.
        """
        stop = self.start + keys.shape[2]
        self.keys[layer][self._rows, :, self.start : stop] = keys
        self.values[layer][self._rows, :, self.start : stop] = values
        seen = slice(self.first, self.visible)
        return self.keys[layer][self._rows, :, seen], self.values[layer][self._rows, :, seen]

    def gather(self, columns: Tensor) -> None:
        """Move columns to the front: column j of row i becomes what column `columns[i, j]` was;
        [rows, at most all].
        """
        rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
        for numbers in (self.keys, self.values):
            moved = numbers[:, rows, :, columns]
            numbers[:, : columns.shape[0], :, : columns.shape[1]] = moved.permute(2, 0, 3, 1, 4)

    def _allocate(self, numbers: int) -> Tensor:
        # Zeros, not just any memory: a masked NaN would still spoil the product of weights and
        # values.
        return torch.zeros(numbers, dtype=self.shape.dtype, device=self.shape.device)


class LayeredKV:
    """What all layers of a model store: `far` for those that see everything, `near` for those with
    a sliding window.

    While prompts are filled in, both have the same columns. `settle` leaves `near` only the last
    tokens of each prompt: `shift` columns fewer than `far` has before the first column of a reply.
    """

    def __init__(self, shape: KVShape, near: frozenset[int]) -> None:
        self.shape = shape
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
        """Forget everything and take another size."""
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
        """End the filling of prompts, and return the positions of what `near` keeps [rows,
        columns]; below 0: nothing.

        Row i has `prompts[i]` tokens, before column `base`.
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
        """Shrink to `size` rows that hold the given ones, and return where they are now; `used`
        columns are in use.
        """
        self.near.keep(rows, size, used - self.shift)
        return self.far.keep(rows, size, used)

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return a copy of a row's columns, before `settle`."""
        return *self.far.read(row, start, stop), *self.near.read(row, start, stop)

    def write(self, row: int, start: int, block: tuple[Tensor, ...]) -> None:
        """Store what `read` returned."""
        far_keys, far_values, near_keys, near_values = block
        self.far.write(row, start, (far_keys, far_values))
        self.near.write(row, start, (near_keys, near_values))


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What a layer of a Transformers model sees of the buffer."""

    def __init__(self, buffer: KVBuffer, number: int) -> None:
        super().__init__()
        self._buffer = buffer
        self._number = number

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self._buffer.update(self._number, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffer is allocated before the first pass."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffer.visible, 0

    def get_seq_length(self) -> int:
        return self._buffer.start

    def get_max_length(self) -> int:
        return self._buffer.columns
