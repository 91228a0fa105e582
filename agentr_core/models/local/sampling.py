"""How a token is drawn: one uniform number, from the reply's own stream, through the inverse
distribution function.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = (1 << 64) - 1


def uniforms(seed: int, reply: int, count: int) -> NDArray[np.float64]:
    """Return the first `count` numbers, in [0, 1), of the stream of a request's seed and a reply's
    number.

    The generator is counter-based (Philox) and keyed by both, so streams need no state and do not
    overlap.
    """
    key = np.array([seed & _WORD, reply & _WORD], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Return one token for each row.

    `logits` [rows, vocabulary]; `temperature`, `top_p`, `uniform` [rows], float64. A row of
    temperature 0 takes the likeliest token. The others invert the distribution function in the
    order of the vocabulary, in float64, so that a rounding error of the logits changes a token with
    no more probability than its own size.
    """
    greedy = logits.argmax(dim=-1)
    drawn = temperature > 0
    if not bool(drawn.any()):
        return greedy
    scaled = logits.double() / torch.where(drawn, temperature, 1.0)[:, None]
    probabilities = scaled.softmax(dim=-1)
    if bool((top_p < 1).any()):
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(dim=-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    sampled = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(drawn, sampled, greedy)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the natural log-probability [rows] of each row's token at temperature 1, before any
    top-p cut.
    """
    return logits.double().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return the probabilities with all but the fewest likeliest tokens that reach `top_p` set to
    zero.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(before < top_p[:, None], ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(1, order, kept)
