"""When a failed request is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.system import RetryPolicy, retry_after_seconds, wait_before_retry

POLICY = RetryPolicy(retries=5, seconds=60)


@pytest.mark.parametrize(("failures", "bound"), [(1, 0.5), (2, 1), (3, 2), (5, 8)])
def test_the_bound_of_the_wait_doubles(failures: int, bound: float) -> None:
    assert wait_before_retry(POLICY, num_failures=failures, elapsed_seconds=0, random_fraction=1) == bound
    assert wait_before_retry(POLICY, num_failures=failures, elapsed_seconds=0, random_fraction=0.25) == bound / 4
    assert wait_before_retry(POLICY, num_failures=failures, elapsed_seconds=0, random_fraction=0) == 0


def test_a_server_is_given_the_time_it_asks_for_and_the_jitter() -> None:
    assert wait_before_retry(POLICY, num_failures=1, elapsed_seconds=0, random_fraction=0.5, retry_after=7) == 7.25
    assert wait_before_retry(POLICY, num_failures=1, elapsed_seconds=0, random_fraction=0.5, retry_after=-7) == 0.25


def test_tries_and_time_have_an_end() -> None:
    assert wait_before_retry(POLICY, num_failures=6, elapsed_seconds=0, random_fraction=0) is None
    assert wait_before_retry(POLICY, num_failures=1, elapsed_seconds=60.1, random_fraction=0) is None
    assert wait_before_retry(POLICY, num_failures=1, elapsed_seconds=1, random_fraction=0, retry_after=59.5) is None
    assert (
        wait_before_retry(RetryPolicy(retries=0, seconds=60), num_failures=1, elapsed_seconds=0, random_fraction=0)
        is None
    )


@given(
    failures=st.integers(1, 10**6), elapsed=st.floats(0, 1e4), uniform=st.floats(0, 1, exclude_max=True),
    told=st.none() | st.floats(0, 1e9),
)  # fmt: skip
def test_no_wait_is_negative_or_ends_too_late(
    failures: int, elapsed: float, uniform: float, told: float | None
) -> None:
    policy = RetryPolicy(retries=10**6, seconds=300)
    wait = wait_before_retry(
        policy, num_failures=failures, elapsed_seconds=elapsed, random_fraction=uniform, retry_after=told
    )
    assert wait is None or (wait >= 0 and elapsed + wait <= 300 and wait >= (told or 0))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("soon", None),
        ("", None),
    ],
)
def test_a_server_says_when_to_come_back_in_seconds_or_by_a_date(header: str, seconds: float | None) -> None:
    assert retry_after_seconds(header, now=10.0) == seconds
