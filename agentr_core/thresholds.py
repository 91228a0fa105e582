"""Comparisons of rewards with the thresholds of a recipe, with room for rounding."""

from __future__ import annotations

_ROUNDING = 1e-9
"""Rewards are sums and quotients of small numbers: far coarser than this, and far less exact than a decimal number."""


def clears(reward: float, alpha: float) -> bool:
    """Return whether a reward reaches `alpha`.

    The paper writes "more than alpha" and sets alpha to 1.0 in its third iteration, where that accepts nothing;
    "at least" is the reading that makes sense of all three of its values.
    """
    return reward >= alpha - _ROUNDING


def exceeds(value: float, line: float) -> bool:
    """Return whether a value lies above a line by more than rounding."""
    return value > line + _ROUNDING
