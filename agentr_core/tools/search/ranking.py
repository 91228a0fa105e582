"""Rankings of the rows of a corpus by how well they match a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ranked = list[tuple[int, float]]
"""Rows with their scores, the best first; with equal scores the earlier row first."""


class Ranker(Protocol):
    """A ranking of the rows of one corpus. Threads may share it."""

    @property
    def name(self) -> str:
        """The name of the provider in calls of the search tool."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that decide the ranking, besides the corpus."""
        ...

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranked]:
        """Return at most `top_k` rows for each query."""
        ...


def best(scores: NDArray[np.float32], top_k: int) -> Ranked:
    """Return the rows with the `top_k` highest scores above 0."""
    least = np.partition(scores, -top_k)[-top_k] if len(scores) > top_k else 0.0
    found = np.flatnonzero((scores >= least) & (scores > 0))
    rows = found[np.argsort(-scores[found], kind="stable")][:top_k]
    return list(zip(rows.tolist(), scores[rows].tolist(), strict=True))
