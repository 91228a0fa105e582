from __future__ import annotations

import math

import pytest

from agentr_core.reports import wording
from agentr_core.reports.document import Estimate


@pytest.mark.parametrize(
    ("difference", "text"),
    [(0.24, "+24.0"), (-0.0041, "\N{MINUS SIGN}0.4"), (0.0, "0.0"), (-0.0001, "0.0"), (0.0004, "0.0")],
)
def test_points_are_signed_with_a_true_minus_and_no_signed_zero(difference: float, text: str) -> None:
    assert wording.points(difference) == text


def test_a_small_negative_number_is_no_signed_zero() -> None:
    assert wording.decimal(-0.000004, 5) == "0.00000"
    assert wording.decimal(-0.00001, 5) == "\N{MINUS SIGN}0.00001"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7384, "2 h 03 min"),
    ],
)
def test_durations_carry_over_when_they_round_up(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


def test_a_mean_reward_below_0_has_a_true_minus() -> None:
    assert [wording.percent(mean) for mean in (-0.15, 0.15, -0.0001)] == ["\N{MINUS SIGN}15.0", "15.0", "0.0"]


def test_an_interval_in_percent() -> None:
    assert wording.interval(Estimate(value=0.5, low=0.4119, high=0.5501, n=9)) == "41.2\N{EN DASH}55.0"
    assert wording.interval(None) == wording.NOTHING


def test_what_a_reader_would_not_see_is_written_out() -> None:
    assert wording.escape_invisible("a\x00b\r\n\tc\u202ed\ud800") == "a\\u0000b\\u000d\n\tc\\u202ed\\ud800"


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_estimate_must_be_finite(wrong: float) -> None:
    with pytest.raises(ValueError, match="leave the estimate out"):
        Estimate(value=wrong, low=0.0, high=1.0, n=0)


@pytest.mark.parametrize(
    ("name", "heading", "value", "said"),
    [
        ("renamed:success_clustered", "renamed: success clustered %", 0.5167, "51.7"),
        ("depth-3/pass@8", "depth-3/pass@8 %", 0.25, "25.0"),
        ("best_of_8_success", "best of 8 success %", 0.75, "75.0"),
        ("best_of_8_reward", "best of 8 reward", 0.75, "0.750"),
        ("steps_to_success", "steps to success", 3.2, "3.200"),
        ("test:loops@1", "test: loops@1", 0.5, "0.500"),
    ],
)
def test_a_measure_that_is_a_share_is_told_in_percent(name: str, heading: str, value: float, said: str) -> None:
    assert wording.measure_name(name) == heading
    assert wording.measure_value(name, value) == said
