"""Records of what a policy could learn from its own experience, estimated before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.evaluation.metrics import Estimate
from agentr_core.evaluation.pass_rates import PassRates

_FEW = 8
"""Fewer contrasts than this are less than one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The evidence from sampled episodes of some training instances about all the instances that an
    iteration collects from.

    `instances` is the number of all these instances; `has_expert` says whether the environment has
    an expert for them.
    """

    rates: PassRates
    instances: int
    has_expert: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected number of items of one kind that an iteration would make, with its 95%
    interval.
    """

    name: str
    expected: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What the verdicts of a judge on all steps of some lost episodes are worth; shares in [0, 1].

    All but `read` are compared with the world's oracle; without one they are NaN, as is a share of
    nothing.
    """

    name: str
    votes: int
    episodes: int
    steps: int
    read: Estimate
    """Verdicts that could be read."""
    right: Estimate
    """Verdicts that are the oracle's."""
    bad_is_right: Estimate
    """Steps called bad that are bad."""
    bad_is_seen: Estimate
    """Bad steps that are called bad."""
    first_error: Estimate
    """Episodes whose first bad step is the oracle's, or that have none for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The prospect of a method: whether it has anything to learn from, why, and the numbers behind
    it.
    """

    method: str
    learns: bool
    reason: str
    forecasts: tuple[Forecast, ...]


def prospect(method: str, forecasts: Sequence[Forecast], *, needs: str, short: str) -> Prospect:
    """Return the prospect of a method, judged by the one forecast that it needs most.

    Args:
        needs: the name of that forecast.
        short: the reason to give if the number is too small.
    """
    number = next(forecast.expected.mean for forecast in forecasts if forecast.name == needs)
    learns = number >= _FEW
    said = f"about {number:.0f} {needs.replace('_', ' ')}"
    reason = f"{said} to learn from" if learns else f"{said}, less than a batch: {short}"
    return Prospect(method=method, learns=learns, reason=reason, forecasts=tuple(forecasts))
