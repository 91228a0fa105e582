"""The samples of one optimizer step as few rows of few lengths, without samples seeing each other.

    position_ids   0 1 2 3 4 5 | 0 1 2 3 | 0 1 2 . .     one row: three samples and its filling
    labels         - - a b - c | - - d e | - f g . .     a sample's first token is never a target

Where positions restart, transformers builds a block-diagonal attention mask, if it is called
without `attention_mask` and with `use_cache=False`. A row with a single sample needs no mask, and
the filling at the end is never looked at by what comes before it.

Rows are only filled up to the longest sample of the step, or `ROW` if that is more: attention under
a block-diagonal mask costs the square of the row, whatever the samples in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agentr_core.samples.labels import IGNORED

ROW = 512
"""Rows may always get this long; short samples alone in a row would leave the processor waiting for
Python.
"""
QUANTUM = 64


class TokenRow(NamedTuple):
    """One sample: token ids, and labels of the same length with -100 where no loss is wanted."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


class TokenPair(NamedTuple):
    """The two sides of a preference."""

    chosen: TokenRow
    rejected: TokenRow


def trained_tokens(row: TokenRow | TokenPair) -> int:
    """Return the number of tokens that carry loss: the first token of a row has nothing before it
    to be told from.
    """
    if isinstance(row, TokenPair):
        return sum(map(trained_tokens, row))
    return sum(label != IGNORED for label in row.labels[1:])


def padded_length(tokens: int) -> int:
    """Return the row length used for so many tokens: a multiple of 64 up to 512, and 4 to 8 lengths
    an octave above.

    Few lengths matter: every new shape makes the CPU compile new kernels, and memory grows.
    """
    quantum = max(QUANTUM, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // quantum) * quantum


def bins(lengths: Sequence[int], *, packing: bool) -> list[list[int]]:
    """Return which samples share a row, as indices into `lengths`; the longest come first (first
    fit, decreasing).
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if not packing:
        return [[index] for index in order]
    capacity = max(ROW, padded_length(max(lengths)))
    filled: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((place for place, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            filled.append([index])
            room.append(capacity - lengths[index])
        else:
            filled[place].append(index)
            room[place] -= lengths[index]
    return filled


def forward_passes(rows: Sequence[TokenRow], *, packing: bool, rows_per_pass: int) -> list[dict[str, torch.Tensor]]:
    """Return what the model is given for one optimizer step, one forward pass after the other.

    Each pass has `input_ids`, `labels` and `position_ids` of the shape (at most `rows_per_pass`,
    length); rows of about the same length come together. No rows make no passes.
    """
    if not rows:
        return []
    packed = [_join([rows[index] for index in group]) for group in bins([len(r.labels) for r in rows], packing=packing)]
    packed.sort(key=lambda row: -len(row["labels"]))
    return [_stack(packed[start : start + rows_per_pass]) for start in range(0, len(packed), rows_per_pass)]


def idle_pass() -> dict[str, torch.Tensor]:
    """Return a pass without any trained token, for a process that has nothing left to do in a
    step.
    """
    return _stack([{"input_ids": [0], "labels": [IGNORED], "position_ids": [0]}])


def _join(samples: Sequence[TokenRow]) -> dict[str, list[int]]:
    return {
        "input_ids": [token for sample in samples for token in sample.input_ids],
        "labels": [label for sample in samples for label in (IGNORED, *sample.labels[1:])],
        "position_ids": [position for sample in samples for position in range(len(sample.labels))],
    }


def _stack(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = padded_length(max(len(row["labels"]) for row in rows))

    def fill(row: dict[str, list[int]]) -> dict[str, list[int]]:
        missing = length - len(row["labels"])
        # Positions go on counting: a restart would look like one more sample, and call for a mask.
        last = row["position_ids"][-1]
        return {
            "input_ids": row["input_ids"] + [0] * missing,
            "labels": row["labels"] + [IGNORED] * missing,
            "position_ids": row["position_ids"] + list(range(last + 1, last + 1 + missing)),
        }

    filled = [fill(row) for row in rows]
    return {name: torch.tensor([row[name] for row in filled]) for name in ("input_ids", "labels", "position_ids")}
