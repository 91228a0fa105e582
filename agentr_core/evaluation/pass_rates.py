"""How often a policy wins each instance, and what to expect of further episodes; pure functions.

An instance of pass rate p is won by an episode with chance p, independently of its other episodes.
Most rates are near 0 or 1, and only those in between teach by contrast, so a mean rate says little.
The rates are assumed to have a Beta distribution, whose mean and spread are matched to the sample;
an instance's own episodes then update it to the Beta distribution of that instance (empirical
Bayes: Casella 1985). This distribution is only used for the chance of a given number of wins and
losses in a given order, which has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentr_core.evaluation.metrics import Estimate, clustered_mean, within

Run = Callable[[int, int], float]
"""A function of two numbers, wins and losses: the chance that episodes of an instance end with
these, in one given order.
"""
_SIMILARITY = (0.001, 0.999)
"""The bounds of the correlation between two episodes of one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The results of sampled episodes of one instance; `greedy` says whether its greedy episode
    won.

    `origin` is the instance that it is a variant of, or itself.
    """

    key: str
    origin: str
    depth: int | None
    episodes: int
    wins: int
    greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """The pass rates of instances: the tried instances, and the Beta distribution of all rates."""

    tried: tuple[Tried, ...]
    alpha: float
    beta: float

    def run(self, one: Tried) -> Run:
        """Return the chances of wins and losses of a tried instance."""
        alpha, beta = self.alpha + one.wins, self.beta + one.episodes - one.wins
        least = _log_beta(alpha, beta)
        return lambda wins, losses: math.exp(_log_beta(alpha + wins, beta + losses) - least)

    def total(self, instances: int, expected: Callable[[Tried, Run], float], *, most: float = math.inf) -> Estimate:
        """Return the expected sum over `instances` instances, of which the tried ones are a sample,
        with the 95% interval that reflects which instances were tried.

        `n` is the number of tried instances; `most` is the most that an instance can give.
        """
        values = [expected(one, self.run(one)) for one in self.tried]
        found = clustered_mean(values, [one.origin for one in self.tried])
        low, high = (end * instances for end in (found.low, found.high))
        return within(Estimate(mean=found.mean * instances, low=low, high=high, n=found.n), 0.0, most * instances)


def pass_rates(tried: Sequence[Tried]) -> PassRates:
    """Return the pass rates of instances of which some were tried, each at least twice.

    The Beta distribution has the observed mean rate, and the observed correlation between two
    episodes of one instance: (E[p^2] - E[p]^2) / (E[p] - E[p]^2), with unbiased estimates of both
    expectations. Raises `ValueError` if no instance was tried, or one only once.
    """
    if not tried or min(one.episodes for one in tried) < 2:
        raise ValueError("pass rates need at least one instance, and two episodes of each")
    once = sum(one.wins / one.episodes for one in tried) / len(tried)
    twice = sum(one.wins * (one.wins - 1) / (one.episodes * (one.episodes - 1)) for one in tried) / len(tried)
    # Even if all episodes were won, or none, one more might have ended differently.
    unseen = 1 / (2 * sum(one.episodes for one in tried))
    mean = min(max(once, unseen), 1 - unseen)
    spread = (twice - once**2) / (mean - mean**2)
    similarity = min(max(spread, _SIMILARITY[0]), _SIMILARITY[1])
    weight = 1 / similarity - 1
    return PassRates(tried=tuple(tried), alpha=mean * weight, beta=(1 - mean) * weight)


def mixed(run: Run, episodes: int) -> float:
    """Return the chance that among `episodes` episodes at least one wins and at least one does not:
    a group with contrast.
    """
    return 1 - run(0, episodes) - run(episodes, 0)


def _log_beta(alpha: float, beta: float) -> float:
    return math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
