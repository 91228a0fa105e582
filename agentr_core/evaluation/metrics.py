"""Scores of an evaluation, with intervals; pure functions over finished episodes.

Every interval is at 95%. Source: Agent-R (arXiv 2501.11425), section 4, for the choice of scores;
its loop metric has no published definition, so ours is stated in `count_loops`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

from agentr_core.types import StopReason, Trajectory

LOOP_LENGTHS = range(1, 6)
MIN_LOOP_REPEATS = 3
"""How many times in a row a sequence of actions must occur for its episode to count as stuck."""
_NUM_RESAMPLES = 2000
_MAX_VALUES_DRAWN = 1 << 14
"""How many values a bootstrap draws at a time: few enough for the caches of a processor."""
_NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)
# Student's t, two-sided 95%, for 1 to 30 degrees of freedom.
_T_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over `n` values with its 95% interval; all three are NaN when there are no values.

    `low` and `high` are also NaN when there are too few values for an interval.
    """

    mean: float
    low: float
    high: float
    n: int


NO_ESTIMATE = Estimate(mean=math.nan, low=math.nan, high=math.nan, n=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """Measures of how much episodes repeat themselves. `per_episode[L]` is the mean over episodes
    of `count_loops` for length L, 1 to 5.

    `stuck_share` is the share of episodes in which a sequence of 1 to 5 actions occurs at least
    three times in a row.
    """

    per_episode: Mapping[int, float]
    stuck_share: float


def success_rate(successes: Sequence[bool]) -> Estimate:
    """Return the share of successes with its Wilson score interval (Wilson 1927)."""
    n = len(successes)
    return _wilson(sum(successes) / n, n) if n else NO_ESTIMATE


def _wilson(share: float, num_values: int) -> Estimate:
    centre = (share + _NORMAL_QUANTILE**2 / (2 * num_values)) / (1 + _NORMAL_QUANTILE**2 / num_values)
    half_width = (
        _NORMAL_QUANTILE
        * math.sqrt(share * (1 - share) / num_values + _NORMAL_QUANTILE**2 / (4 * num_values**2))
        / (1 + _NORMAL_QUANTILE**2 / num_values)
    )
    # Rounding must not push an interval past the share itself, nor out of [0, 1].
    return Estimate(
        mean=share,
        low=max(0.0, min(centre - half_width, share)),
        high=min(1.0, max(centre + half_width, share)),
        n=num_values,
    )


def mean_reward(rewards: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the mean with its percentile bootstrap interval from 2,000 resamples, which `seed`
    determines.
    """
    n = len(rewards)
    if n == 0:
        return NO_ESTIMATE
    values = np.asarray(rewards, dtype=np.float64)
    rng = np.random.default_rng(seed)
    chunk_size = max(1, _MAX_VALUES_DRAWN // n)
    resamples = (
        rng.integers(0, n, (min(chunk_size, _NUM_RESAMPLES - start), n))
        for start in range(0, _NUM_RESAMPLES, chunk_size)
    )
    means = np.concatenate([values[rows].mean(axis=1) for rows in resamples])
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(mean=float(values.mean()), low=float(low), high=float(high), n=n)


def reward_with_disasters(trajectory: Trajectory, disaster_reward: float) -> float:
    """Return the contribution of an episode to a mean reward: its reward, or `disaster_reward` if
    it ended in a disaster.
    """
    return disaster_reward if trajectory.stop is StopReason.DISASTER else trajectory.reward


def clustered_mean(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean with an interval that allows for dependence between values of one cluster.

    The interval uses the cluster-robust (sandwich) variance with the factor G / (G - 1) for G
    clusters, and Student's t with G - 1 degrees of freedom; if each value is a cluster of its own,
    it is the usual t interval. It is NaN for a single cluster. `n` counts values. Source: Cameron
    and Miller (2015), section II.

    Args:
        clusters: the name of each value's cluster.
    """
    n = len(values)
    if n == 0:
        return NO_ESTIMATE
    mean = fmean(values)
    deviation_by_cluster: defaultdict[str, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        deviation_by_cluster[cluster] += value - mean
    num_clusters = len(deviation_by_cluster)
    if num_clusters == 1:
        return Estimate(mean=mean, low=math.nan, high=math.nan, n=n)
    standard_error = (
        math.sqrt(num_clusters / (num_clusters - 1) * sum(total**2 for total in deviation_by_cluster.values())) / n
    )
    half_width = t_quantile(num_clusters - 1) * standard_error
    return Estimate(mean=mean, low=mean - half_width, high=mean + half_width, n=n)


def clustered_share(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean of values in [0, 1] with the interval of `clustered_mean`, clipped to [0, 1]
    and never of zero width (`widen_empty_interval`).
    """
    return widen_empty_interval(clip_interval(clustered_mean(values, clusters), 0.0, 1.0), len(set(clusters)))


def widen_empty_interval(estimate: Estimate, num_independent: int) -> Estimate:
    """Return an estimate whose interval is not of zero width, as it is when no episode succeeded.

    An interval of zero width is replaced by Wilson's for `num_independent` values; that of a mean
    outside [0, 1] is kept.
    """
    if math.isclose(estimate.low, estimate.high, abs_tol=1e-9) and 0.0 <= estimate.mean <= 1.0:
        return replace(_wilson(estimate.mean, num_independent), n=estimate.n)
    return estimate


def clip_interval(estimate: Estimate, minimum: float, maximum: float) -> Estimate:
    """Return an estimate with its interval clipped to [`minimum`, `maximum`]."""
    # Comparisons with NaN are false, so an unknown interval stays unknown.
    low, high = (
        (minimum if estimate.low < minimum else estimate.low),
        (maximum if estimate.high > maximum else estimate.high),
    )
    return Estimate(mean=estimate.mean, low=low, high=high, n=estimate.n)


def pass_at(k: int, num_episodes: int, num_successes: int) -> float:
    """Return the unbiased estimate of the chance that at least one of `k` episodes succeeds, from
    `num_episodes` that were played.

    Source: Chen et al. (arXiv 2107.03374), equation 1. Needs 1 <= k <= `num_episodes`.
    """
    return 1.0 - math.comb(num_episodes - num_successes, k) / math.comb(num_episodes, k)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `limit`, and `limit` itself."""
    return tuple(sorted({2**i for i in range(limit.bit_length()) if 2**i <= limit} | {limit}))


def mean_steps_to_success(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean number of steps of the successful episodes; NaN when there are none."""
    steps = [len(trajectory.steps) for trajectory in trajectories if trajectory.success]
    return fmean(steps) if steps else math.nan


def count_loops(actions: Sequence[str], length: int) -> int:
    """Return the number of positions at which `length` actions equal the `length` actions directly
    before them.
    """
    return sum(actions[i : i + length] == actions[i - length : i] for i in range(length, len(actions) - length + 1))


def is_stuck(actions: Sequence[str]) -> bool:
    """Return whether a sequence of 1 to 5 actions occurs at least three times in a row."""
    return first_loop(actions) is not None


class Loop(NamedTuple):
    """A sequence of `length` actions that occurs `times` times in a row."""

    start: int
    """The position of its first action, from 0."""
    length: int
    times: int

    @property
    def stop(self) -> int:
        """The position after its last action."""
        return self.start + self.length * self.times


def first_loop(actions: Sequence[str], start: int = 0) -> Loop | None:
    """Return the first loop that begins at or after position `start`: a sequence of 1 to 5 actions
    that occurs at least three times in a row. Of several that begin at the same action it is the
    one that reaches furthest, then the shortest. None if there is no loop.
    """
    for position in range(start, len(actions)):
        loops = [Loop(position, length, _num_repeats(actions, position, length)) for length in LOOP_LENGTHS]
        long_loops = [loop for loop in loops if loop.times >= MIN_LOOP_REPEATS]
        if long_loops:
            return max(long_loops, key=lambda loop: loop.stop)
    return None


def all_loops(actions: Sequence[str]) -> Iterator[Loop]:
    """Yield the loops of an episode in order; each is the first that begins after the one before it
    has ended.
    """
    loop = first_loop(actions)
    while loop:
        yield loop
        loop = first_loop(actions, loop.stop)


def _num_repeats(actions: Sequence[str], start: int, length: int) -> int:
    """Return how many times in a row the `length` actions from `start` occur, at least 1."""
    num_repeats = 1
    sequence = actions[start : start + length]
    while actions[start + num_repeats * length : start + (num_repeats + 1) * length] == sequence:
        num_repeats += 1
    return num_repeats


def measure_loops(episodes: Sequence[Sequence[str]]) -> Loops:
    """Return how much episodes, given as their actions, repeat themselves; all values are NaN if
    there are no episodes.
    """
    if not episodes:
        return Loops(per_episode=dict.fromkeys(LOOP_LENGTHS, math.nan), stuck_share=math.nan)
    return Loops(
        per_episode={length: fmean(count_loops(actions, length) for actions in episodes) for length in LOOP_LENGTHS},
        stuck_share=fmean(is_stuck(actions) for actions in episodes),
    )


def mean_over_seeds(scores: Sequence[float]) -> Estimate:
    """Return the mean of one score per seed with Student's t interval; a single score has no
    interval.
    """
    return clustered_mean(scores, [str(seed) for seed in range(len(scores))])


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5% quantile of Student's t with `degrees_of_freedom` degrees of freedom:
    tabulated up to 30, then the first terms of its expansion in 1/freedom (Abramowitz and Stegun
    1964, 26.7.5).
    """
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    z = _NORMAL_QUANTILE
    return z + (z**3 + z) / (4 * degrees_of_freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)


# How often a policy wins each instance, and what to expect of further episodes; pure functions.
#
# Each episode of an instance with pass rate p is won with probability p, independently of the other
# episodes. Most rates are near 0 or 1, and only those in between teach by contrast, so a mean rate
# says little. The rates are assumed to have a Beta distribution, whose mean and spread are matched
# to the sample; an instance's own episodes then update it to the Beta distribution of that instance
# (empirical Bayes: Casella 1985). This distribution is only used for the chance of a given number
# of wins and losses in a given order, which has a closed form.

OutcomeProbability = Callable[[int, int], float]
"""A function of two numbers, wins and losses: the chance that episodes of an instance end with
these, in one given order.
"""
_CORRELATION_BOUNDS = (0.001, 0.999)
"""The bounds of the correlation between two episodes of one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceResults:
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
    """The results of the tried instances, and the Beta(`alpha`, `beta`) distribution of the pass
    rates of all instances.
    """

    tried: tuple[InstanceResults, ...]
    alpha: float
    beta: float

    def run(self, result: InstanceResults) -> OutcomeProbability:
        """Return the chances of further wins and losses of a tried instance, given its results."""
        alpha, beta = self.alpha + result.wins, self.beta + result.episodes - result.wins
        log_norm = _log_beta(alpha, beta)
        return lambda wins, losses: math.exp(_log_beta(alpha + wins, beta + losses) - log_norm)

    def total(
        self,
        num_instances: int,
        expectation: Callable[[InstanceResults, OutcomeProbability], float],
        *,
        max_per_instance: float = math.inf,
    ) -> Estimate:
        """Return the expected sum of a value over `num_instances` instances, of which the tried
        ones are a sample, with a 95% interval clustered by origin.

        If every episode was won, or every one lost, the values have no spread; then the interval is
        widened to the sums at both ends of Wilson's interval of the pass rate (Wilson 1927).

        Args:
            expectation: returns the expected value of an instance, given its chances.
            max_per_instance: the largest value that an instance can have; the least is 0.
        """
        values = [expectation(result, self.run(result)) for result in self.tried]
        mean = clustered_mean(values, [result.origin for result in self.tried])
        low, high = mean.low, mean.high
        observed_rate = sum(result.wins for result in self.tried) / sum(result.episodes for result in self.tried)
        if observed_rate in (0.0, 1.0):
            rates = _wilson(observed_rate, len({result.origin for result in self.tried}))
            for bound in (rates.low, rates.high):

                def probability(wins: int, losses: int, rate: float = bound) -> float:
                    return math.pow(rate, wins) * math.pow(1 - rate, losses)

                value = fmean(expectation(result, probability) for result in self.tried)
                # With a single origin the interval is NaN, and comparisons with NaN are false.
                low, high = min(value, mean.mean, low), max(value, mean.mean, high)
        total = Estimate(mean=mean.mean * num_instances, low=low * num_instances, high=high * num_instances, n=mean.n)
        return clip_interval(total, 0.0, max_per_instance * num_instances)


def estimate_pass_rates(results: Sequence[InstanceResults]) -> PassRates:
    """Return the pass rates estimated from the tried instances, each with at least two episodes.

    The Beta distribution has the observed mean rate, and the observed correlation between two
    episodes of one instance: (E[p^2] - E[p]^2) / (E[p] - E[p]^2), with unbiased estimates of both
    expectations. Raises `ValueError` if no instance was tried, or if one has a single episode.
    """
    if not results or min(result.episodes for result in results) < 2:
        raise ValueError("pass rates need at least one instance, and two episodes of each")
    mean_rate = sum(result.wins / result.episodes for result in results) / len(results)
    mean_squared_rate = sum(
        result.wins * (result.wins - 1) / (result.episodes * (result.episodes - 1)) for result in results
    ) / len(results)
    # Even if all episodes were won, or none, one more might have ended differently.
    margin = 1 / (2 * sum(result.episodes for result in results))
    mean = min(max(mean_rate, margin), 1 - margin)
    correlation = (mean_squared_rate - mean_rate**2) / (mean - mean**2)
    bounded_correlation = min(max(correlation, _CORRELATION_BOUNDS[0]), _CORRELATION_BOUNDS[1])
    weight = 1 / bounded_correlation - 1
    return PassRates(tried=tuple(results), alpha=mean * weight, beta=(1 - mean) * weight)


def mixed_probability(probability: OutcomeProbability, num_episodes: int) -> float:
    """Return the chance that of `num_episodes` episodes at least one wins and at least one does
    not, so that as a group they have contrast.
    """
    return 1 - probability(0, num_episodes) - probability(num_episodes, 0)


def _log_beta(alpha: float, beta: float) -> float:
    return math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)


# What a policy could learn from its own experience, estimated before any training.

_MIN_EXPECTED = 8
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
    """The quality of a judge's verdicts on all steps of some lost episodes, as shares in [0, 1].

    All shares but `read` are relative to the world's oracle; without an oracle they are NaN, as is
    a share of no cases.
    """

    name: str
    votes: int
    episodes: int
    steps: int
    read: Estimate
    """The share of verdicts that could be read."""
    right: Estimate
    """The share of verdicts that agree with the oracle."""
    bad: Estimate
    """The share of steps that are bad: the precision of a judge that calls every step bad."""
    bad_is_right: Estimate
    """The share of steps called bad that are bad (precision)."""
    bad_is_seen: Estimate
    """The share of bad steps that are called bad (recall)."""
    first_error: Estimate
    """The share of episodes in which judge and oracle name the same first bad step, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The prospect of a method: whether it has enough to learn from, the reason, and the forecasts
    behind it.
    """

    method: str
    learns: bool
    reason: str
    forecasts: tuple[Forecast, ...]


def prospect(method: str, forecasts: Sequence[Forecast], *, needed_forecast: str, shortage_reason: str) -> Prospect:
    """Return the prospect of a method, judged by the one forecast that it needs most: the expected
    number must be at least a batch, 8, and its interval must be above 0.

    Args:
        needed_forecast: the name of that forecast.
        shortage_reason: the reason to give if the number is too small.
    """
    expected = next(forecast.expected for forecast in forecasts if forecast.name == needed_forecast)
    amount = f"about {expected.mean:.0f} {needed_forecast.replace('_', ' ')}"
    if expected.mean < _MIN_EXPECTED:
        reason = f"{amount}, less than a batch: {shortage_reason}"
    elif expected.low <= 0:
        reason = f"{amount}, or none: these episodes do not tell"
    else:
        return Prospect(method=method, learns=True, reason=f"{amount} to learn from", forecasts=tuple(forecasts))
    return Prospect(method=method, learns=False, reason=reason, forecasts=tuple(forecasts))
