"""When a failed request to a server is tried again: one policy, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_BASE_SECONDS = 0.5
_CAP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The limits of retrying: `retries` tries after the first, none begun more than `seconds` after
    the first.
    """

    retries: int
    seconds: float


def wait_before_retry(
    policy: RetryPolicy, *, failures: int, elapsed: float, uniform: float, retry_after: float | None = None
) -> float | None:
    """Return how many seconds to wait before the next try, or None if the policy allows no more.

    The wait is drawn from zero to a bound that doubles with each failure from 0.5 to 30 seconds
    ("full jitter"). If the server says when to come back, the jitter is added to that time, so that
    many clients that were told the same do not come back at once.

    Args:
        failures: tries that have failed, at least 1.
        elapsed: seconds since the first try began.
        uniform: a random number in [0, 1).
        retry_after: the seconds that the server asked for, if it did.
    """
    if failures > policy.retries:
        return None
    # Beyond 2**16 the cap has long been reached.
    wait = uniform * min(_CAP_SECONDS, _BASE_SECONDS * 2 ** min(failures - 1, 16)) + max(retry_after or 0.0, 0.0)
    return wait if elapsed + wait <= policy.seconds else None


def seconds_told(header: str, *, now: float) -> float | None:
    """Return the seconds to wait according to a `Retry-After` header, a number or a date; None if
    it is neither.

    Args:
        now: seconds since 1970.
    """
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now)
    except ValueError:
        return None
