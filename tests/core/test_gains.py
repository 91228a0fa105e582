"""Differences between two models over the same episodes."""

from __future__ import annotations

import math

import pytest

from agentr_core.stages.measures import mean_gain


def test_the_interval_of_a_difference_ends_where_differences_of_shares_end() -> None:
    found = mean_gain([(-1.0, "a"), (0.0, "b")])
    assert (found.mean, found.low, found.high) == (-0.5, -1.0, 1.0)
    many = mean_gain([(1.0, f"{number}") for number in range(50)] + [(0.0, f"other {number}") for number in range(50)])
    assert many.mean == 0.5
    assert many.mean - many.low == pytest.approx(many.high - many.mean)
    assert math.isnan(mean_gain([(1.0, "a")]).low), "one cluster has no interval"
