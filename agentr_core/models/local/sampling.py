"""Draws tokens: one uniform number each, from the reply's own random stream, through the inverse
cumulative distribution function.

A vocabulary is read in blocks: the likeliest token, or the one on which a uniform number falls, is
looked for first among the blocks and then within one block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

_MASK_64 = (1 << 64) - 1
_BLOCK_SIZE = 256
_NUM_CACHED_LOGITS = 1 << 18
"""About how many logits fit into a core's own cache while they are read several times."""
_MIN_TEMPERATURE = 1e-30
"""The least temperature used in computing: smaller ones would be 0 in float32, and choose the
likeliest token, too.
"""
_NUM_LIKELY = 256
"""How many of a row's likeliest tokens are examined first for those that reach `top_p`."""
_BELOW_ONE = 1 - 2**-53


def uniforms(seed: int, reply: int, count: int) -> NDArray[np.float64]:
    """Return the first `count` numbers, in [0, 1), of the random stream for a request's seed and a
    reply's number.

    The generator is counter-based (Philox) and keyed by both, so streams need no state and do not
    overlap.
    """
    key = np.array([seed & _MASK_64, reply & _MASK_64], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def rows_at_once(vocabulary: int) -> int:
    """Return how many rows of logits should be processed together on a CPU, so that they stay in
    its cache.
    """
    return max(1, _NUM_CACHED_LOGITS // vocabulary)


def apply_penalty(logits: Tensor, penalty: Tensor, seen_mask: Tensor) -> Tensor:
    """Return logits [rows, vocabulary] with the repetition penalty applied: the logits of tokens
    that a row has seen (`seen_mask` [rows, vocabulary]) are divided by the row's `penalty` [rows]
    where positive, else multiplied by it.

    Source: arXiv 1909.05858, with the sign rule of Transformers' processor.
    """
    factor = penalty[:, None].to(logits.dtype)
    return torch.where(seen_mask, torch.where(logits < 0, logits * factor, logits / factor), logits)


class Logits:
    """Rows of logits [rows, vocabulary], as float32 in blocks; the last block is padded with minus
    infinity. `peak` [rows] is each row's highest logit.

    A token's weight is its probability, divided by that of the row's likeliest token.
    """

    def __init__(self, logits: Tensor) -> None:
        num_missing = -logits.shape[-1] % _BLOCK_SIZE
        padded_logits = pad(logits.float(), (0, num_missing), value=-torch.inf) if num_missing else logits.float()
        self._blocks = padded_logits.view(len(padded_logits), -1, _BLOCK_SIZE)
        self._highest = self._blocks.amax(dim=-1)
        self.peak = self._highest.amax(dim=-1)
        self._plain_weights: tuple[Tensor, Tensor] | None = None

    def select_rows(self, rows: Tensor) -> Logits:
        """Return the logits of the rows that a boolean mask [rows] selects."""
        return self if bool(rows.all()) else Logits(self.flat()[rows])

    def flat(self) -> Tensor:
        """Return the logits [rows, vocabulary], including the padding."""
        return self._blocks.flatten(-2)

    def likeliest(self) -> Tensor:
        """Return each row's token with the highest logit [rows], the first of equal ones."""
        block = self._highest.argmax(dim=-1)
        return block * _BLOCK_SIZE + _select_blocks(self._blocks, block).argmax(dim=-1)

    def weights(self, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights [rows, blocks, tokens] at a temperature [rows] for each row, or at 1
        for all, and the sum of each block [rows, blocks], in float64.
        """
        if temperature is not None and bool((temperature != 1).any()):
            return self._weights(temperature.clamp(min=_MIN_TEMPERATURE).float())
        if self._plain_weights is None:
            self._plain_weights = self._weights(None)
        return self._plain_weights

    def _weights(self, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        differences = self._blocks - self.peak[:, None, None]
        if temperature is not None:
            differences /= temperature[:, None, None]
        weights = differences.exp_()
        return weights, weights.sum(dim=-1).double()


# Not by Gumbel noise, which draws a number for each token of the vocabulary.
def choose_tokens(
    logits: Logits,
    temperature: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return one token for each row [rows].

    `temperature`, `top_p`, `uniform` and `min_p` are [rows], float64; `top_k` is [rows], integers,
    of which 0 means all. None: no row has that limit. A row of temperature 0 takes the likeliest
    token. The others invert the cumulative distribution over the vocabulary in its order. Its sums
    are in float64, so a rounding error of the logits changes a token only with about the
    probability that equals the error.
    """
    sampled_rows = temperature > 0
    if not bool(sampled_rows.any()):
        return logits.likeliest()
    limited_rows = top_p < 1
    if top_k is not None:
        limited_rows = limited_rows | (top_k > 0)
    if min_p is not None:
        limited_rows = limited_rows | (min_p > 0)
    limited_rows = sampled_rows & limited_rows
    unlimited_rows = sampled_rows & ~limited_rows
    tokens = torch.zeros_like(uniform, dtype=torch.long) if bool(sampled_rows.all()) else logits.likeliest()
    if bool(unlimited_rows.any()):
        tokens[unlimited_rows] = _tokens_at(
            *logits.select_rows(unlimited_rows).weights(temperature[unlimited_rows]), uniform[unlimited_rows]
        )
    if bool(limited_rows.any()):
        scaled_logits = logits.flat()[limited_rows].double() / temperature[limited_rows][:, None]
        limits = (None if limit is None else limit[limited_rows] for limit in (top_k, min_p))
        weights = filtered_probabilities(scaled_logits, top_p[limited_rows], *limits).view(
            len(scaled_logits), -1, _BLOCK_SIZE
        )
        tokens[limited_rows] = _tokens_at(weights, weights.sum(dim=-1), uniform[limited_rows])
    return tokens


def log_probabilities(logits: Logits, tokens: Tensor) -> Tensor:
    """Return the natural log-probability [rows] of each row's token at temperature 1, before any
    penalty or filter: `logits` are the model's.
    """
    _, sums = logits.weights()
    token_logits = logits.flat().gather(1, tokens[:, None])[:, 0].double()
    return token_logits - logits.peak.double() - sums.sum(dim=-1).log()


def _tokens_at(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """Return the token [rows] on which the row's uniform number falls. `sums` [rows, blocks] are
    the sums of the blocks of `weights`.
    """
    block_ends = sums.cumsum(dim=-1)
    threshold = uniform[:, None] * block_ends[:, -1:]
    block = torch.searchsorted(block_ends, threshold, right=True).clamp(max=block_ends.shape[-1] - 1)
    block_sum = sums.gather(1, block)
    # Rounding may put the threshold outside the block; clamp it, since a token beyond the edge may
    # have no weight at all.
    share = ((threshold - (block_ends.gather(1, block) - block_sum)) / block_sum).clamp(0, _BELOW_ONE)
    token_ends = _select_blocks(weights, block[:, 0]).double().cumsum(dim=-1)
    token = torch.searchsorted(token_ends, share * token_ends[:, -1:], right=True).clamp(max=_BLOCK_SIZE - 1)
    return (block * _BLOCK_SIZE + token)[:, 0]


def _select_blocks(blocks: Tensor, number: Tensor) -> Tensor:
    return blocks[torch.arange(len(blocks), device=blocks.device), number]


def filtered_probabilities(
    logits: Tensor, top_p: Tensor, top_k: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """Return the probabilities [rows, vocabulary] of logits that are divided by their temperature
    already, with 0 for tokens that are filtered out; the others are not rescaled, so a row may sum
    to less than 1. Limits are as in `choose_tokens`.

    The order is that of Transformers' warpers: top-k, with all ties at its edge; then top-p on the
    rest; then min-p.
    """
    if top_k is not None:
        # All but each row's `top_k` highest are set to minus infinity.
        vocabulary = logits.shape[-1]
        top_k_by_row = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
        limited_rows = top_k_by_row < vocabulary
        num_likeliest = int(top_k_by_row[limited_rows].max()) if bool(limited_rows.any()) else 1
        threshold = logits.topk(num_likeliest, dim=-1).values.gather(
            1, top_k_by_row.clamp(max=num_likeliest)[:, None] - 1
        )
        logits = torch.where(limited_rows[:, None] & (logits < threshold), -torch.inf, logits)
    probabilities = logits.softmax(dim=-1)
    limited_rows = top_p < 1
    if bool(limited_rows.any()):
        # Only the fewest likeliest tokens that reach `top_p` are kept; of equal ones the first. A
        # row with `top_p` 1 keeps all, whatever the other rows have. Sorting a whole vocabulary
        # takes longer than computing its logits, so a few of the likeliest are tried first.
        num_likeliest = min(_NUM_LIKELY, probabilities.shape[-1])
        sorted_probs = probabilities.topk(num_likeliest, dim=-1).values
        num_kept = (sorted_probs.cumsum(dim=-1) - sorted_probs < top_p[:, None]).sum(dim=-1, keepdim=True)
        if num_likeliest < probabilities.shape[-1] and bool((limited_rows & (num_kept[:, 0] == num_likeliest)).any()):
            sorted_probs = probabilities.sort(dim=-1, descending=True).values
            num_kept = (sorted_probs.cumsum(dim=-1) - sorted_probs < top_p[:, None]).sum(dim=-1, keepdim=True)
        min_probability = sorted_probs.gather(1, num_kept - 1)
        ties = probabilities == min_probability
        num_ties = num_kept - (sorted_probs > min_probability).sum(dim=-1, keepdim=True)
        nucleus = (
            (probabilities > min_probability) | (ties & (ties.cumsum(dim=-1) <= num_ties)) | ~limited_rows[:, None]
        )
        probabilities = torch.where(nucleus, probabilities, 0.0)
    if min_p is not None:
        min_probability = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        probabilities = torch.where(probabilities < min_probability, 0.0, probabilities)
    return probabilities
