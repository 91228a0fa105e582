"""Which replies are decoded together, and in which shapes.

A *row* is one prompt in the key/value cache with up to `width` replies growing side by side; a
*wave* is a set of rows decoded in step. The number of slots (rows * width) is taken from a short
ladder of sizes, because on a CPU every new shape compiles new kernels, and because matrix products
give a row the same bits for every multiple of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_WIDTH = 8
"""The most replies that share one row: each adds one column per step that the others must skip."""
_LEAST_SLOTS = 16
_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a wave: the number of its prompt, and those of the replies that grow in it."""

    prompt: int
    replies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows decoded in step, each with `width` slots; a row with fewer replies leaves slots idle."""

    width: int
    rows: tuple[Row, ...]


def plan(lengths: Sequence[int], replies: Sequence[Sequence[int]], *, max_batch: int, max_width: int) -> list[Wave]:
    """Return waves of at most `max_batch` slots (one row at least) that cover every reply once.

    `lengths[p]` is the number of tokens of prompt p, `replies[p]` the replies wanted for it. Rows
    of equal width go together, shorter prompts first, so that little of a wave's attention falls on
    padding.
    """
    by_width: dict[int, list[Row]] = {}
    for prompt, wanted in enumerate(replies):
        width = min(1 << (len(wanted) - 1).bit_length(), max_width)
        for start in range(0, len(wanted), width):
            by_width.setdefault(width, []).append(Row(prompt, tuple(wanted[start : start + width])))
    waves = []
    for width, rows in sorted(by_width.items()):
        rows.sort(key=lambda row: (lengths[row.prompt], row.prompt))
        count = max(1, max_batch // width)
        waves += [Wave(width, tuple(rows[start : start + count])) for start in range(0, len(rows), count)]
    return waves


def padded_rows(rows: int, width: int) -> int:
    """Return the number of rows, idle ones included, with which `rows` rows are computed.

    rows * width is rounded up to the next of 16, 32, 48, 64, 96, 128, 192, ... `width` is a power
    of two up to 16.
    """
    slots = rows * width
    size = _LEAST_SLOTS
    while size < slots:
        if size > _LEAST_SLOTS and size + size // 2 >= slots:
            size += size // 2
            break
        size *= 2
    return size // width


def padded_columns(columns: int) -> int:
    """Return how many columns a pass reads to see the first `columns`: the next multiple of 64, so
    that few shapes occur. Columns beyond `columns` are masked.
    """
    return -(-columns // _COLUMNS) * _COLUMNS
