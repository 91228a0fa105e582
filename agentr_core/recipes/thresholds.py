"""Comparisons of rewards with the thresholds of a recipe, with room for rounding."""

from __future__ import annotations

from typing import Literal

AlphaRule = Literal["at_least", "more_than"]

_ROUNDING = 1e-9
"""Room for rounding: rewards are sums and quotients of small numbers, which differ by far more than
this, and floats do not hold them exactly.
"""


def clears(reward: float, alpha: float, rule: AlphaRule = "at_least") -> bool:
    """Return whether a reward reaches `alpha`, or by the rule `more_than` lies above it.

    The paper writes "more than alpha" and sets alpha to 1.0 in its third iteration, where that
    would accept nothing, so the full reward, 1, clears every alpha by either rule.
    """
    if rule == "more_than" and reward < 1 - _ROUNDING:
        return exceeds(reward, alpha)
    return reward >= alpha - _ROUNDING


def exceeds(value: float, line: float) -> bool:
    """Return whether a value lies above a line by more than rounding."""
    return value > line + _ROUNDING
