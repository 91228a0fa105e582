"""Draws tokens: one uniform number each, from the reply's own stream, through the inverse
distribution function.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = (1 << 64) - 1


def uniforms(seed: int, reply: int, count: int) -> NDArray[np.float64]:
    """Return the first `count` numbers, in [0, 1), of the stream for a request's seed and a reply's
    number.

    The generator is counter-based (Philox) and keyed by both, so streams need no state and do not
    overlap.
    """
    key = np.array([seed & _WORD, reply & _WORD], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def penalised(logits: Tensor, penalty: Tensor, seen: Tensor) -> Tensor:
    """Return logits [rows, vocabulary], float64, in which those of tokens that a row has `seen`
    [rows, vocabulary] are divided by its penalty [rows] where positive, else multiplied by it.

    Source: arXiv 1909.05858, with the sign rule of Transformers' processor.
    """
    exact, factor = logits.double(), penalty[:, None]
    return torch.where(seen, torch.where(exact < 0, exact * factor, exact / factor), exact)


def choose(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return one token for each row.

    `logits` [rows, vocabulary]; `temperature`, `top_p`, `uniform` and `min_p` [rows], float64;
    `top_k` [rows], whole numbers, of which 0 means all. None: no row has a limit. A row of
    temperature 0 takes the likeliest token. The others invert the distribution function in the
    order of the vocabulary, in float64, so that a rounding error of the logits changes a token with
    no more probability than its own size.
    """
    greedy = logits.argmax(dim=-1)
    drawn = temperature > 0
    if not bool(drawn.any()):
        return greedy
    scaled = logits.double() / torch.where(drawn, temperature, 1.0)[:, None]
    probabilities = filtered(scaled, top_p, top_k, min_p)
    cumulative = probabilities.cumsum(dim=-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    sampled = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(drawn, sampled, greedy)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the natural log-probability [rows] of each row's token at temperature 1, before any
    penalty or filter: `logits` are the model's.
    """
    return logits.double().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def filtered(scaled: Tensor, top_p: Tensor, top_k: Tensor | None = None, min_p: Tensor | None = None) -> Tensor:
    """Return the probabilities [rows, vocabulary] of logits at their temperature, 0 for tokens that
    are filtered out; the rest does not sum to 1. Arguments are as in `choose`.

    As in Transformers' warpers: top-k, with all ties at its edge; then top-p on the rest; then
    min-p.
    """
    if top_k is not None:
        scaled = _likeliest(scaled, top_k)
    probabilities = scaled.softmax(dim=-1)
    if bool((top_p < 1).any()):
        probabilities = _nucleus(probabilities, top_p)
    if min_p is not None:
        least = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        probabilities = torch.where(probabilities < least, 0.0, probabilities)
    return probabilities


def _likeliest(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Return the logits with all but each row's `top_k` highest set to minus infinity."""
    vocabulary = scaled.shape[-1]
    numbers = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    limited = numbers < vocabulary
    most = int(numbers[limited].max()) if bool(limited.any()) else 1
    edge = scaled.topk(most, dim=-1).values.gather(1, numbers.clamp(max=most)[:, None] - 1)
    return torch.where(limited[:, None] & (scaled < edge), -torch.inf, scaled)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return the probabilities with all but the fewest likeliest tokens that reach `top_p` set to
    zero. A row with `top_p` 1 keeps all, whatever the other rows have.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where((before < top_p[:, None]) | (top_p == 1)[:, None], ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(1, order, kept)
