"""Keys and values of prompts and replies: how they are laid out, filled and shared."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain, count
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import create_causal_mask

from agentr_core.models.local.waves import padded_columns

# Additive attention masks: tokens see all tokens before them, or only the nearest ones.

MaskInput = Tensor | dict[str, Tensor]
"""The `attention_mask` of a Transformers model: one mask, or one for each kind of layer."""
_RANGE_MULTIPLE = 16
"""The ranges of columns that near layers read begin and end at multiples of this number, so that
few shapes occur.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayers:
    """How far the layers of a model look back.

    Args:
        window: the number of tokens, itself included, that a token sees in a near layer; None
            without such layers.
        near_layers: the numbers of the layers with a sliding window shorter than the context; the
            others are far layers.
        has_both_kinds: the model has layers of both kinds and takes one mask for each; otherwise
            all layers are alike.
    """

    window: int | None = None
    near_layers: frozenset[int] = frozenset()
    has_both_kinds: bool = False

    def mask_input(self, far: Tensor, near: Tensor | None) -> MaskInput:
        """Return the model's `attention_mask`, made from the masks of its far and its near layers;
        `near` None: all layers use `far`.
        """
        if self.has_both_kinds:
            return {"full_attention": far, "sliding_attention": far if near is None else near}
        return far if near is None else near

    def padded_range(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of columns, as its first column and its end, that near layers read in a
        step that needs those from `first` up to `end`: it is widened to multiples of 16.
        """
        return max(0, first) // _RANGE_MULTIPLE * _RANGE_MULTIPLE, -(-end // _RANGE_MULTIPLE) * _RANGE_MULTIPLE

    def window_mask(self, mask: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        """Return a mask [rows, 1, queries, columns] that also hides the columns before the window
        of each query.

        `keys` are the positions of the columns' tokens [rows, columns], `queries` those of the new
        tokens [rows, queries].
        """
        assert self.window is not None
        return mask.masked_fill(keys[:, None, None, :] <= queries[:, None, :, None] - self.window, -torch.inf)


class MaskView:
    """The part of one buffer that the slots of a batch see: an additive mask [rows, 1, width,
    columns], and the positions of the columns' tokens [rows, columns].

    Column c of the batch is column c - `shift` of the buffer.
    """

    def __init__(self, mask: Tensor, positions: Tensor, shift: int) -> None:
        self.mask = mask
        self.positions = positions
        self._shift = shift

    def step_mask(self, column: int, positions: Tensor, size: int) -> Tensor:
        """Return the mask [rows, 1, width * size, columns] of a step that writes the columns from
        `column` on, `size` for each slot, with tokens at `positions` [rows, width * size].

        A token sees what its slot sees, and in this step the tokens of its slot up to itself.
        """
        start, count = column - self._shift, positions.shape[1]
        self.positions[:, start : start + count] = positions
        if size == 1:
            self.mask[:, 0, :, start : start + count].diagonal(dim1=1, dim2=2).zero_()
            return self.mask
        number = torch.arange(count, device=self.mask.device)
        slots = number // size
        allowed_mask = (slots[:, None] == slots) & (number[:, None] >= number)
        mask = self.mask.repeat_interleave(size, dim=2)
        mask[:, 0, :, start : start + count].masked_fill_(allowed_mask, 0)
        return mask

    def unmask(self, column: int, counts: Tensor, size: int) -> None:
        """Let each slot see the first `counts` [rows, width] of the `size` columns that it wrote
        from `column` on; the others stay masked.
        """
        start, width = column - self._shift, counts.shape[1]
        visible_mask = torch.arange(size, device=counts.device) < counts[..., None]
        own = torch.eye(width, dtype=torch.bool, device=counts.device)[:, :, None]
        part = self.mask[:, 0, :, start : start + width * size]
        part.masked_fill_((own & visible_mask[:, :, None, :]).flatten(2), 0)

    def add_columns(self, num_columns: int) -> None:
        """Add `num_columns` masked columns, as was done with the buffer."""
        self.mask = torch.nn.functional.pad(self.mask, (0, num_columns), value=-torch.inf)
        self.positions = torch.nn.functional.pad(self.positions, (0, num_columns))

    def select_rows(self, rows: Tensor) -> None:
        """Reduce the view to copies of the given rows, in their order."""
        self.mask, self.positions = self.mask[rows], self.positions[rows]


# Key/value caches of fixed rows and growing columns, written in place.
#
# Transformers' own growing cache copies itself whole at every token, and its static cache gives all
# rows one length.

CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
"""The name of the argument and the output of models that hold their cache; Transformers 5.24
changed it.
"""
Block = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys and values of some consecutive tokens in far layers, then keys and values of the last of
these tokens in near layers: each [layers, heads, tokens, head size].
"""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of the keys and values that each layer stores for a token; equal for all layers."""

    num_layers: int
    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


class KVBuffer:
    """Keys and values of each layer [rows, heads, columns, head size], and the columns that a
    forward pass reads and writes.

    Before a forward pass, call `set_range` or `set_columns` to set the columns that it writes and
    those that it may attend to. The caller must mask columns that hold no token of a row; they hold
    finite numbers.
    """

    _row_selection: slice | Tensor
    _row_indices: Tensor | None
    _write_columns: int | Tensor
    _read_columns: slice | Tensor

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._memory = [self._allocate(0) for _ in range(shape.num_layers)]
        self._spare_memory = self._allocate(0)
        self.reset(0, 0)

    def reset(self, rows: int, columns: int) -> None:
        """Discard all contents and change the size. Memory is kept, since touching fresh memory
        takes longer than a decode step.
        """
        self.num_rows, self.num_columns = rows, columns
        self._layers: list[tuple[Tensor, Tensor]] = []
        for number, memory in enumerate(self._memory):
            self._memory[number] = self._enough_memory(memory)
            self._layers.append(self._layer_views(self._memory[number]))
        self.set_range(0, 0)

    def set_range(self, start: int, visible: int, first: int = 0) -> None:
        """Let the next forward pass, over all rows, write from column `start` on and see the
        columns from `first` up to `visible`.
        """
        self._row_selection, self._row_indices = slice(None), None
        self._write_columns, self._read_columns = start, slice(first, visible)
        self.start, self.num_visible = start, visible

    def set_columns(self, rows: Sequence[int], columns: Tensor, visible: Tensor | int) -> None:
        """Let the next forward pass, over `rows`, write each row to its own `columns`
        [rows, tokens].

        Each row sees its own columns `visible` [rows, columns], in which numbers below 0 mean
        no column; or, if `visible` is an integer, all columns below it.
        """
        self._row_indices = torch.tensor(rows, device=self.shape.device)[:, None]
        # Adjacent rows are read in place; indexing would copy all that is visible.
        are_adjacent = rows[-1] - rows[0] == len(rows) - 1 and sorted(rows) == list(rows)
        self._row_selection = slice(rows[0], rows[-1] + 1) if are_adjacent else self._row_indices[:, 0]
        self._write_columns, self._read_columns = (
            columns,
            slice(0, visible) if isinstance(visible, int) else visible.clamp(min=0),
        )
        self.start, self.num_visible = 0, visible if isinstance(visible, int) else visible.shape[1]

    def grow(self, columns: int) -> None:
        """Increase the number of columns to `columns`, keeping what is stored."""
        self.num_columns = columns
        # Rows stay contiguous, so each layer moves to other memory, and the next layer to the
        # memory that it has left: a second memory for all layers would double the size.
        for number, layer in enumerate(self._layers):
            self._memory[number], self._spare_memory = self._enough_memory(self._spare_memory), self._memory[number]
            self._layers[number] = self._layer_views(self._memory[number])
            for new, old in zip(self._layers[number], layer, strict=True):
                new[:, :, : old.shape[2]] = old

    def shrink(self, rows: Sequence[int], num_rows: int, num_columns: int) -> list[int]:
        """Shrink to `num_rows` rows that include `rows`; return the new index of each of
        `rows`, in their order.

        Rows inside the new size stay; the others move into the gaps. Only the first `num_columns`
        columns are moved.
        """
        staying = {row for row in rows if row < num_rows}
        gaps = iter(row for row in range(num_rows) if row not in staying)
        new_rows = [row if row < num_rows else next(gaps) for row in rows]
        sources = [row for row in rows if row >= num_rows]
        targets = [new_row for row, new_row in zip(rows, new_rows, strict=True) if row >= num_rows]
        for number, layer in enumerate(self._layers):
            for tensor in layer:
                tensor[targets, :, :num_columns] = tensor[sources, :, :num_columns]
            self._layers[number] = layer[0][:num_rows], layer[1][:num_rows]
        self.num_rows = num_rows
        return new_rows

    def read(self, row: int, columns: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and of the values in some columns of a row, each [layers,
        heads, columns, head size]; the head sizes of the two may differ.
        """
        parts = []
        for part, size in enumerate((self.shape.key_size, self.shape.value_size)):
            # There may be no layer, in a buffer for far or near layers of a model that has none of
            # them.
            empty = torch.empty(
                0, self.shape.num_heads, self.num_columns, size, dtype=self.shape.dtype, device=self.shape.device
            )
            layers = (layer[part][row, :, columns][None] for layer in self._layers)
            parts.append(torch.cat([empty[:, :, columns], *layers]))
        keys, values = parts
        return keys, values

    def write(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values that `read` returned in a row, from column `start` on."""
        stop = start + keys.shape[2]
        for layer, new in zip(self._layers, zip(keys, values, strict=True), strict=True):
            for storage, numbers in zip(layer, new, strict=True):
                storage[row, :, start:stop] = numbers

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens [rows, heads, tokens, head size] in a layer;
        return all its visible keys and values.
        """
        stored_keys, stored_values = self._layers[layer]
        return self._store_and_read(stored_keys, keys), self._store_and_read(stored_values, values)

    def _store_and_read(self, storage: Tensor, new: Tensor) -> Tensor:
        """Store new keys or values in a layer's storage; return what is visible of it."""
        if isinstance(self._write_columns, int):
            storage[self._row_selection, :, self._write_columns : self._write_columns + new.shape[2]] = new
        else:
            storage[self._row_indices, :, self._write_columns] = new.transpose(1, 2)
        if isinstance(self._read_columns, slice):
            return storage[self._row_selection, :, self._read_columns]
        return storage[self._row_indices, :, self._read_columns].transpose(1, 2)

    def move_to_front(self, columns: Tensor) -> None:
        """Move columns to the front: column j of row i becomes the former column `columns[i,
        j]`. `columns` is [rows, n], with n at most the number of columns.
        """
        rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
        for numbers in chain.from_iterable(self._layers):
            selection = numbers[rows, :, columns]
            numbers[: columns.shape[0], :, : columns.shape[1]] = selection.transpose(1, 2)

    def _enough_memory(self, memory: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return memory with room for a layer of the current size: the given memory if it suffices,
        otherwise new memory.
        """
        tokens = self.num_rows * self.shape.num_heads * self.num_columns
        return memory if memory[0].numel() >= tokens * self.shape.key_size else self._allocate(tokens)

    def _layer_views(self, memory: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return views of memory as the keys and values of a layer [rows, heads, columns, head
        size].
        """
        size = self.num_rows, self.shape.num_heads, self.num_columns
        keys, values = memory
        return (
            keys[: prod(size) * self.shape.key_size].view(*size, self.shape.key_size),
            values[: prod(size) * self.shape.value_size].view(*size, self.shape.value_size),
        )

    def _allocate(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return zeroed memory for the keys and for the values of `tokens` tokens of one head."""
        # Zeros, not uninitialised memory: even masked, a NaN would spoil the product of weights and
        # values.
        sizes = (self.shape.key_size, self.shape.value_size)
        keys, values = (torch.zeros(tokens * size, dtype=self.shape.dtype, device=self.shape.device) for size in sizes)
        return keys, values


class LayeredKV:
    """The keys and values of all layers of a model: `far` for layers in which a token sees all
    tokens before it, `near` for those in which it sees the last `window` tokens, itself included.

    While prompts are filled in, both have the same columns. `finish_prompts` keeps only the last
    tokens of each prompt in `near`; from then on, column c of a reply in `far` is column c -
    `shift` in `near`.
    """

    def __init__(self, shape: KVShape, near: frozenset[int], window: int | None) -> None:
        self.shape = shape
        self._num_before = 0 if window is None else window - 1
        self.far = KVBuffer(replace(shape, num_layers=shape.num_layers - len(near)))
        self.near = KVBuffer(replace(shape, num_layers=len(near)))
        self.shift = 0
        far_numbers, near_numbers = count(), count()
        self.cache = Cache(
            layers=[
                _LayerCache(self.near, next(near_numbers))
                if number in near
                else _LayerCache(self.far, next(far_numbers))
                for number in range(shape.num_layers)
            ]
        )

    def reset(self, rows: int, columns: int) -> None:
        """Discard all contents and change the size."""
        self.shift = 0
        self.far.reset(rows, columns)
        self.near.reset(rows, columns)

    @property
    def num_rows(self) -> int:
        return self.far.num_rows

    @property
    def num_columns(self) -> int:
        return self.far.num_columns

    def finish_prompts(self, prompt_lengths: Sequence[int], base: int, window: int) -> Tensor:
        """End the filling of prompts: keep only their last tokens in `near`. Return the positions
        [rows, columns] of the tokens kept there; below 0 for none.

        `prompt_lengths[i]` is the number of tokens filled into row i; all end before column `base`.
        """
        width = min(window - 1, base)
        self.shift = base - width
        positions = torch.tensor(prompt_lengths, device=self.shape.device)[:, None] - width
        positions = positions + torch.arange(width, device=self.shape.device)
        self.near.move_to_front(positions.clamp(min=0))
        return positions

    def grow(self, columns: int) -> None:
        """Increase the number of columns to `columns`, keeping what is stored."""
        self.far.grow(columns)
        self.near.grow(columns)

    def shrink(self, rows: Sequence[int], num_rows: int, num_columns: int) -> list[int]:
        """Shrink to `num_rows` rows that include `rows`; return the new index of each of
        `rows`, in their order. Only the first `num_columns` columns are in use.
        """
        self.near.shrink(rows, num_rows, num_columns - self.shift)
        return self.far.shrink(rows, num_rows, num_columns)

    def set_columns(self, rows: Sequence[int], positions: Tensor, visible: int) -> tuple[Tensor, Tensor]:
        """Let the next forward pass, over `rows`, fill in prompts at `positions` [rows,
        tokens], which are consecutive in each row. Return the positions [rows or 1, columns] that
        far layers, and that near layers, then see; below 0 for none.
        """
        device = self.shape.device
        all_columns = torch.arange(visible, device=device)[None]
        self.far.set_columns(rows, positions, visible)
        length = self._num_before + positions.shape[1]
        if length >= visible:
            self.near.set_columns(rows, positions, visible)
            return all_columns, all_columns
        near_columns = positions[:, :1] - self._num_before + torch.arange(length, device=device)
        self.near.set_columns(rows, positions, near_columns)
        return all_columns, near_columns

    def read(self, row: int, start: int, stop: int) -> Block:
        """Return a copy of the tokens of a prompt from `start` up to `stop`; in near layers, only
        of those that a later token may see. Only before `finish_prompts`.
        """
        first = max(start, stop - self._num_before)
        return *self.far.read(row, slice(start, stop)), *self.near.read(row, slice(first, stop))

    def read_reply(self, row: int, columns: Sequence[int], near: Sequence[int]) -> Block:
        """Return a copy of the tokens in these columns of far layers, in the form of `read`. Only
        after `finish_prompts`; `near` are the tokens' columns in near layers, before the shift is
        subtracted.
        """
        device = self.shape.device
        last = torch.tensor(near[max(0, len(near) - self._num_before) :], dtype=torch.long, device=device) - self.shift
        return *self.far.read(row, torch.tensor(columns, device=device)), *self.near.read(row, last)

    def write(self, row: int, blocks: Sequence[Block]) -> None:
        """Store consecutive blocks in the form that `read` returns, from the beginning of a row on.
        Only before `finish_prompts`.
        """
        keys, values = (torch.cat([block[part] for block in blocks], dim=2) for part in (0, 1))
        self.far.write(row, 0, keys, values)
        size = blocks[0][0].shape[2]
        for number in range(max(0, len(blocks) - -(-self._num_before // size)), len(blocks)):
            _, _, keys, values = blocks[number]
            self.near.write(row, (number + 1) * size - keys.shape[2], keys, values)


class _LayerCache(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer, as Transformers expects it, backed by a buffer."""

    def __init__(self, buffer: KVBuffer, number: int) -> None:
        super().__init__()
        self._buffer = buffer
        self._number = number

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self._buffer.update(self._number, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffer is allocated before the first pass."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffer.num_visible, 0

    def get_seq_length(self) -> int:
        return self._buffer.start

    def get_max_length(self) -> int:
        return self._buffer.num_columns


# Keys and values of prompt prefixes that were computed before.
#
# The turns of an episode, and the nodes of a tree, share almost all of their prompts. Prefixes are
# stored in blocks of fixed length. A block's keys and values depend only on the tokens up to its
# end, so a block is looked up by the hash of those tokens.


def block_hashes(tokens: Sequence[int], length: int) -> list[bytes]:
    """Return one name for each whole block of `length` tokens: a hash of all tokens up to the
    block's end.
    """
    hashes = []
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens) - length + 1, length):
        digest.update(array("q", tokens[start : start + length]).tobytes())
        hashes.append(digest.digest())
    return hashes


class PrefixCache:
    """A cache of the most recently used blocks, by name, up to a number of bytes. Not thread-safe:
    one worker owns it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._num_bytes = 0

    def get(self, block_hash: bytes) -> Block | None:
        """Return a cached block, and mark it as used; None if it is not cached."""
        block = self._blocks.get(block_hash)
        if block is not None:
            self._blocks.move_to_end(block_hash)
        return block

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def put(self, block_hash: bytes, block: Block) -> None:
        """Store a block, unless it is cached already. Nothing is evicted before `trim`."""
        if block_hash not in self._blocks:
            self._blocks[block_hash] = block
            self._num_bytes += _block_bytes(block)

    def trim(self) -> None:
        """Evict the least recently used blocks until the rest fits into `max_bytes`."""
        while self._num_bytes > self.max_bytes:
            _, block = self._blocks.popitem(last=False)
            self._num_bytes -= _block_bytes(block)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)


def _block_bytes(block: Block) -> int:
    return sum(part.numel() * part.element_size() for part in block)


# Fills the rows of a batch with the keys and values of their prompts.
#
# The part of a row that is in the prefix cache is copied; the rest is computed, each row from its
# own column on, together with rows that have about as many tokens left. What several rows share at
# their beginning is computed once.

BLOCK_SIZE = 16
"""The number of tokens in a block of the prefix cache. A prompt that continues a cached one is
computed from the last whole block on, so half a block is computed again on average.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The sizes of forward passes over prompts.

    Args:
        max_tokens: the most tokens of a pass.
        padded_lengths: the lengths to which its rows are padded, ascending; the last one is the
            longest part of a prompt in a pass. No two neighbours, nor 0 and the first, may be more
            than 64 apart, since padding is written behind the longest prompt.
        few_shapes: whether the number of rows must be a power of two.
    """

    max_tokens: int
    padded_lengths: tuple[int, ...]
    few_shapes: bool


CPU_PASS_SIZES = PassSizes(max_tokens=1024, padded_lengths=(16, 32, 48, 64, 96, 128), few_shapes=True)
"""Few shapes, since on a CPU every new one costs time."""
GPU_PASS_SIZES = PassSizes(
    max_tokens=16_384, padded_lengths=(16, 32, 48, 64, 96, *range(128, 2049, 64)), few_shapes=False
)
"""Few passes: each costs a GPU the launch of thousands of kernels, whatever their size."""


@dataclass(slots=True)
class _RowFill:
    """A row while it is filled: its columns before `start` are done. `prefix` is the prompt without
    its last token, `hashes` are those of its whole blocks.
    """

    row: int
    prefix: Sequence[int]
    hashes: list[bytes]
    start: int = 0

    @property
    def num_left(self) -> int:
        return len(self.prefix) - self.start


class Prefill:
    """Fills buffers with the prompts' keys and values, with one model. Not thread-safe: one worker
    owns it.

    `prompt_tokens` counts the tokens of all rows filled so far; of these `cached_tokens` came from
    the cache. `before` is called before each forward pass.
    """

    def __init__(
        self,
        model: Any,
        attention: AttentionLayers,
        prefixes: PrefixCache,
        last_position: int,
        sizes: PassSizes,
        before: Callable[[], None],
    ) -> None:
        self._model = model
        self._attention = attention
        self._prefix_cache = prefixes
        self._last_position = last_position
        self._sizes = sizes
        self._before_pass = before
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def fill(self, buffer: LayeredKV, prefixes: Sequence[Sequence[int]]) -> None:
        """Write the keys and values of `prefixes[i]` into row i of a buffer, from column 0 on.

        The buffer needs a few more columns than the longest head has tokens.
        """
        waiting = [_RowFill(row, prefix, block_hashes(prefix, BLOCK_SIZE)) for row, prefix in enumerate(prefixes)]
        self.prompt_tokens += sum(map(len, prefixes))
        while waiting:
            # A row waits if another row is about to compute a block that it needs.
            ready: list[_RowFill] = []
            blocked: list[_RowFill] = []
            pending_hashes: set[bytes] = set()
            for filling in waiting:
                missing = [block_hash for block_hash in filling.hashes if block_hash not in self._prefix_cache]
                (blocked if missing and missing[0] in pending_hashes else ready).append(filling)
                pending_hashes.update(missing)
            waiting = blocked
            for filling in ready:
                # The cached blocks at the beginning of a row.
                blocks: list[Block] = []
                for block_hash in filling.hashes:
                    block = self._prefix_cache.get(block_hash)
                    if block is None:
                        break
                    blocks.append(block)
                if blocks:
                    buffer.write(filling.row, blocks)
                    filling.start = BLOCK_SIZE * len(blocks)
                    self.cached_tokens += filling.start
            # The rest of each row is computed, and its whole blocks are cached.
            incomplete = [filling for filling in ready if filling.num_left]
            start_by_row = {filling.row: filling.start for filling in incomplete}
            remaining = list(incomplete)
            while remaining:
                for length, chunk in _chunks(remaining, self._sizes):
                    self._forward(buffer, chunk, length)
                remaining = [filling for filling in remaining if filling.num_left]
            for filling in incomplete:
                for number in range(start_by_row[filling.row] // BLOCK_SIZE, len(filling.hashes)):
                    block = buffer.read(filling.row, number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)
                    self._prefix_cache.put(filling.hashes[number], block)

    def _forward(self, buffer: LayeredKV, chunk: Sequence[_RowFill], length: int) -> None:
        """Compute up to `length` tokens of each row of a chunk in one forward pass."""
        self._before_pass()
        tokens = np.zeros((len(chunk), length), dtype=np.int64)
        for line, filling in enumerate(chunk):
            chunk_tokens = filling.prefix[filling.start : filling.start + length]
            tokens[line, : len(chunk_tokens)] = chunk_tokens
        device = buffer.shape.device
        starts = torch.tensor([filling.start for filling in chunk], device=device)
        positions = starts[:, None] + torch.arange(length, device=device)
        end = max(filling.start for filling in chunk) + length
        visible = min(padded_columns(end), buffer.num_columns)
        far_positions, near_positions = buffer.set_columns([filling.row for filling in chunk], positions, visible)
        far_mask, near_mask = causal_mask(far_positions, positions, buffer.shape.dtype), None
        if self._attention.window is not None:
            near_mask = self._attention.window_mask(
                causal_mask(near_positions, positions, buffer.shape.dtype), near_positions, positions
            )
        # The model without its output layer: a prompt's logits are never read.
        self._model.base_model(
            input_ids=torch.from_numpy(tokens).to(device),
            attention_mask=self._attention.mask_input(far_mask, near_mask),
            # Padding may lie beyond the last position; its output is never read.
            position_ids=positions.clamp(max=self._last_position),
            use_cache=True,
            **{CACHE: buffer.cache},
        )
        for filling in chunk:
            filling.start = min(filling.start + length, len(filling.prefix))


def causal_mask(column_positions: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask [rows, 1, queries, columns] that is 0 for columns that hold a token at or
    before the query, else minus infinity. `column_positions` [rows or 1, columns] are the positions
    of the columns' tokens, below 0 for none; `positions` [rows, queries] are those of the queries.
    """
    mask = (column_positions[:, None, :] > positions[:, :, None]) | (column_positions[:, None, :] < 0)
    return torch.zeros(mask.shape, dtype=dtype, device=column_positions.device).masked_fill_(mask, -torch.inf)[:, None]


def _chunks(fillings: Sequence[_RowFill], sizes: PassSizes) -> list[tuple[int, list[_RowFill]]]:
    """Return groups of rows to compute in one pass, each with the padded length of that pass. Every
    row is in one group, and groups have no idle rows.
    """
    by_length: dict[int, list[_RowFill]] = {}
    for filling in fillings:
        length = next((size for size in sizes.padded_lengths if size >= filling.num_left), sizes.padded_lengths[-1])
        by_length.setdefault(length, []).append(filling)
    chunks = []
    for length, rows in sorted(by_length.items()):
        max_rows = sizes.max_tokens // length
        start = 0
        while start < len(rows):
            size = min(max_rows, len(rows) - start)
            if sizes.few_shapes:
                size = 1 << (size.bit_length() - 1)
            chunks.append((length, rows[start : start + size]))
            start += size
    return chunks
