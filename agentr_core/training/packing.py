"""Packs the samples of one optimizer step into a few rows of a few lengths, in which samples do not
see each other.

    position_ids   0 1 2 3 4 5 | 0 1 2 3 | 0 1 2 . .     one row: three samples and padding
    labels         - - a b - c | - - d e | - f g . .     a sample's first token is never a target

Where positions restart, Transformers builds a block-diagonal attention mask, if it is called
without `attention_mask` and with `use_cache=False`. A row with a single sample needs no mask: its
tokens never see the padding after them. FlashAttention tells the samples apart only in a pass of
one row, and layers other than attention not at all.

Rows are no longer than the longest sample of the step, or `ROW_LENGTH` if that is more: attention
under a block-diagonal mask costs the square of the row length, whatever the samples in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import NamedTuple

import numpy as np
import torch

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX

ROW_LENGTH = 512
"""The length up to which rows may always be filled: with one short sample per row, the processor
would wait for Python.
"""
LENGTH_STEP = 64


class TokenRow(NamedTuple):
    """One sample: token ids, and labels of the same length with -100 where no loss is wanted. The
    labels are not shifted.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


class TokenPair(NamedTuple):
    """The two sides of a preference pair."""

    chosen: TokenRow
    rejected: TokenRow


def num_trained_tokens(row: TokenRow | TokenPair) -> int:
    """Return the number of tokens that carry loss. The first token of a row never does: nothing
    precedes it from which to predict it.
    """
    if isinstance(row, TokenPair):
        return sum(map(num_trained_tokens, row))
    return sum(label != IGNORE_INDEX for label in row.labels[1:])


def max_rows_per_pass(config: TrainingConfig, num_rows: int) -> int:
    """Return how many rows a forward pass may have so that samples that share a row do not see each
    other: 1 when packing with FlashAttention, otherwise `num_rows`.
    """
    return 1 if config.packing and config.attn_implementation.startswith("flash_attention") else num_rows


def padded_length(tokens: int) -> int:
    """Return the row length used for `tokens` tokens: a multiple of 64 up to 512; above that, one
    of 4 lengths per doubling.

    There must be few lengths: for every new shape the CPU compiles new kernels, and memory grows.
    """
    multiple = max(LENGTH_STEP, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // multiple) * multiple


def bins(lengths: Sequence[int], *, packing: bool) -> list[list[int]]:
    """Return which samples share a row: groups of indices into `lengths`, formed first-fit
    decreasing (longest samples first). Without packing each sample has its own row.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if not packing:
        return [[index] for index in order]
    capacity = max(ROW_LENGTH, padded_length(max(lengths)))
    groups: list[list[int]] = []
    free_tokens: list[int] = []
    for index in order:
        bin_index = next((bin_index for bin_index, free in enumerate(free_tokens) if free >= lengths[index]), None)
        if bin_index is None:
            groups.append([index])
            free_tokens.append(capacity - lengths[index])
        else:
            groups[bin_index].append(index)
            free_tokens[bin_index] -= lengths[index]
    return groups


def forward_passes(rows: Sequence[TokenRow], *, packing: bool, rows_per_pass: int) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of the model for one optimizer step, one dict for each forward pass.

    Each has `input_ids`, `labels` and `position_ids` of the shape (at most `rows_per_pass`,
    length); rows of about the same length are in the same pass. Without rows there are no passes.
    """
    if not rows:
        return []
    packed_rows: list[dict[str, list[int]]] = []
    for group in bins([len(row.labels) for row in rows], packing=packing):
        samples = [rows[index] for index in group]
        packed_row = {
            "input_ids": [token for sample in samples for token in sample.input_ids],
            "labels": [label for sample in samples for label in (IGNORE_INDEX, *sample.labels[1:])],
            "position_ids": [position for sample in samples for position in range(len(sample.labels))],
        }
        packed_rows.append(packed_row)
    packed_rows.sort(key=lambda row: -len(row["labels"]))
    return [_stack(packed_rows[start : start + rows_per_pass]) for start in range(0, len(packed_rows), rows_per_pass)]


def balanced_shares(lengths: Sequence[int], num_processes: int) -> list[list[int]]:
    """Return for each of `num_processes` processes the indices of the rows that it takes, given
    their lengths: the longest row goes first, each to the process with the fewest tokens so far. A
    single process takes all rows in the given order.
    """
    if num_processes == 1:
        return [list(range(len(lengths)))]
    shares: list[list[int]] = [[] for _ in range(num_processes)]
    tokens_by_share = [0] * num_processes
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        share_index = tokens_by_share.index(min(tokens_by_share))
        shares[share_index].append(index)
        tokens_by_share[share_index] += lengths[index]
    return shares


def idle_pass() -> dict[str, torch.Tensor]:
    """Return the inputs of a pass without trained tokens, for a process that has no rows left in a
    step.
    """
    return _stack([{"input_ids": [0], "labels": [IGNORE_INDEX], "position_ids": [0]}])


def _stack(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = padded_length(max(len(row["labels"]) for row in rows))

    def fill(row: dict[str, list[int]]) -> dict[str, list[int]]:
        num_missing = length - len(row["labels"])
        # Positions keep counting: a restart would look like another sample, and require a mask.
        last_position = row["position_ids"][-1]
        return {
            "input_ids": row["input_ids"] + [0] * num_missing,
            "labels": row["labels"] + [IGNORE_INDEX] * num_missing,
            "position_ids": row["position_ids"] + list(range(last_position + 1, last_position + 1 + num_missing)),
        }

    padded_rows = [fill(row) for row in rows]
    return {name: torch.tensor([row[name] for row in padded_rows]) for name in ("input_ids", "labels", "position_ids")}


# The samples of each optimizer step, fixed before training starts, so that the schedule and the
# token count are exact.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The samples of each optimizer step, as row numbers, and the number of trained tokens up to
    the end of each step.
    """

    steps: tuple[tuple[int, ...], ...]
    cumulative_tokens: tuple[int, ...]
    epochs: float
    """The number of samples in all steps, repeats included, divided by the samples of the dataset.
    """

    def cumulative_tokens_after(self, step: int) -> int:
        """Return the number of trained tokens up to the end of step `step`, counted from 1; after
        its last step the plan starts again.
        """
        num_rounds, num_rest_steps = divmod(step, len(self.steps))
        return num_rounds * self.cumulative_tokens[-1] + (
            self.cumulative_tokens[num_rest_steps - 1] if num_rest_steps else 0
        )


def make_plan(
    tokens_by_row: Sequence[int],
    *,
    per_step: int,
    epochs: float,
    max_tokens: int,
    seed: int,
    lengths: Sequence[int] = (),
    step_tokens: int = 0,
) -> Plan:
    """Return the steps of a training on rows with `tokens_by_row[i]` trained tokens each.

    Rows come in a new random order every epoch; all steps but the last have `per_step` samples,
    also across the boundary of two epochs. With `step_tokens` above 0, a step instead takes samples
    as long as the sum of their `lengths`, in tokens, does not exceed that number, but at least one.
    With `max_tokens` above 0, the plan ends with the sample that reaches that number of trained
    tokens, and `epochs` has no effect.

    Raises `DataFault` when there are no rows, or a row has no trained token.
    """
    if not tokens_by_row:
        raise DataFault("the dataset has no rows; loosen the filters or collect more")
    if min(tokens_by_row) < 1:
        raise DataFault(
            f"row {tokens_by_row.index(min(tokens_by_row))} of the dataset has no trained token; leave it out"
        )
    orders = (np.random.default_rng(derive_seed("epoch order", seed, epoch)) for epoch in count())
    row_stream = (int(row) for generator in orders for row in generator.permutation(len(tokens_by_row)))
    row_order = [] if max_tokens else list(islice(row_stream, max(1, round(epochs * len(tokens_by_row)))))
    num_tokens = 0
    while num_tokens < max_tokens:
        row_order.append(next(row_stream))
        num_tokens += tokens_by_row[row_order[-1]]
    # Agent-R's authors give the size of a step in tokens: their trainer packs rows of full length.
    if step_tokens:
        steps: list[list[int]] = [[]]
        free_tokens = step_tokens
        for row in row_order:
            if steps[-1] and lengths[row] > free_tokens:
                steps.append([])
                free_tokens = step_tokens
            steps[-1].append(row)
            free_tokens -= lengths[row]
    else:
        steps = [row_order[start : start + per_step] for start in range(0, len(row_order), per_step)]
    cumulative_tokens = accumulate(sum(tokens_by_row[row] for row in step) for step in steps)
    return Plan(
        steps=tuple(map(tuple, steps)),
        cumulative_tokens=tuple(cumulative_tokens),
        epochs=len(row_order) / len(tokens_by_row),
    )
