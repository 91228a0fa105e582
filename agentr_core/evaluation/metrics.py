"""Scores of an evaluation, with intervals; pure functions over finished episodes.

Every interval is at 95%. Source: Agent-R (arXiv 2501.11425), section 4, for the choice of scores;
its loop metric has no published definition, so ours is stated in `count_loops`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

import numpy as np

from agentr_core.types import StopReason, Trajectory

LOOP_LENGTHS = range(1, 6)
_IN_A_ROW = 3
"""How often a sequence comes in an episode that is stuck."""
_RESAMPLES = 2000
_AT_ONCE = 1 << 14
"""How many values of a bootstrap are drawn at a time: few enough for the caches of a processor."""
_Z = NormalDist().inv_cdf(0.975)
# Student's t, two-sided 95%, for 1 to 30 degrees of freedom.
_T = (
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


NOTHING = Estimate(mean=math.nan, low=math.nan, high=math.nan, n=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """Measures of how episodes repeat themselves. `per_episode[L]` is the mean of `count_loops` for
    length L, 1 to 5.

    `stuck_share` is the share of episodes in which a sequence of 1 to 5 actions occurs at least
    three times in a row.
    """

    per_episode: Mapping[int, float]
    stuck_share: float


def success_rate(successes: Sequence[bool]) -> Estimate:
    """Return the share of successes with its Wilson interval."""
    n = len(successes)
    return _wilson(sum(successes) / n, n) if n else NOTHING


def _wilson(share: float, n: int) -> Estimate:
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    # Rounding must not push an interval past the share itself, nor out of [0, 1].
    return Estimate(mean=share, low=max(0.0, min(centre - half, share)), high=min(1.0, max(centre + half, share)), n=n)


def mean_reward(rewards: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the mean with its percentile bootstrap interval, drawn with `seed`."""
    n = len(rewards)
    if n == 0:
        return NOTHING
    values = np.asarray(rewards, dtype=np.float64)
    rng = np.random.default_rng(seed)
    several = max(1, _AT_ONCE // n)
    drawn = (rng.integers(0, n, (min(several, _RESAMPLES - made), n)) for made in range(0, _RESAMPLES, several))
    means = np.concatenate([values[rows].mean(axis=1) for rows in drawn])
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(mean=float(values.mean()), low=float(low), high=float(high), n=n)


def counted_reward(trajectory: Trajectory, disaster_counts: float) -> float:
    """Return the contribution of an episode to a mean reward: its reward, or `disaster_counts` if
    it ended in a disaster.
    """
    return disaster_counts if trajectory.stop is StopReason.DISASTER else trajectory.reward


def clustered_mean(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean with its interval over clusters of values that are not independent of each
    other.

    The interval uses the sandwich estimate of the variance with its correction for few clusters,
    and Student's t; if each value is a cluster of its own, it is the usual interval of a mean.
    Source: Cameron and Miller (2015), section II. `n` counts values.
    """
    n = len(values)
    if n == 0:
        return NOTHING
    mean = fmean(values)
    sums: defaultdict[str, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - mean
    groups = len(sums)
    if groups == 1:
        return Estimate(mean=mean, low=math.nan, high=math.nan, n=n)
    spread = math.sqrt(groups / (groups - 1) * sum(total**2 for total in sums.values())) / n
    half = t_quantile(groups - 1) * spread
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)


def clustered_share(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean of values in [0, 1] with its interval over clusters, clipped to [0, 1], and
    never without a width.
    """
    return with_width(within(clustered_mean(values, clusters), 0.0, 1.0), len(set(clusters)))


def with_width(found: Estimate, independent: int) -> Estimate:
    """Return an estimate of a mean in [0, 1]. Where its interval has no width, as when nothing is
    won, it gets Wilson's for as many `independent` values; a mean outside [0, 1] keeps its own.
    """
    if math.isclose(found.low, found.high, abs_tol=1e-9) and 0.0 <= found.mean <= 1.0:
        return replace(_wilson(found.mean, independent), n=found.n)
    return found


def within(found: Estimate, least: float, most: float) -> Estimate:
    """Return an estimate with its interval clipped to [`least`, `most`]."""
    # Comparisons with NaN are false, so an unknown interval stays unknown.
    low, high = (least if found.low < least else found.low), (most if found.high > most else found.high)
    return Estimate(mean=found.mean, low=low, high=high, n=found.n)


def pass_at(k: int, episodes: int, successes: int) -> float:
    """Return the unbiased estimate of the chance that at least one of `k` episodes succeeds, from
    `episodes` that were played.

    Source: Chen et al. (arXiv 2107.03374), equation 1. Needs 1 <= k <= `episodes`.
    """
    return 1.0 - math.comb(episodes - successes, k) / math.comb(episodes, k)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `most`, and `most` itself."""
    return tuple(sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most}))


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
    return any(
        all(actions[i + k] == actions[i + k + length] for k in range(length * (_IN_A_ROW - 1)))
        for length in LOOP_LENGTHS
        for i in range(len(actions) - length * _IN_A_ROW + 1)
    )


def loops(episodes: Sequence[Sequence[str]]) -> Loops:
    """Return how much episodes, given as their actions, repeat themselves; all values are NaN if
    there are no episodes.
    """
    if not episodes:
        return Loops(per_episode=dict.fromkeys(LOOP_LENGTHS, math.nan), stuck_share=math.nan)
    return Loops(
        per_episode={length: fmean(count_loops(actions, length) for actions in episodes) for length in LOOP_LENGTHS},
        stuck_share=fmean(is_stuck(actions) for actions in episodes),
    )


def over_seeds(scores: Sequence[float]) -> Estimate:
    """Return the mean of one score per seed with Student's t interval; a single score has no
    interval.
    """
    return clustered_mean(scores, [str(seed) for seed in range(len(scores))])


def t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t: tabulated up to 30 degrees of freedom, then
    computed by its expansion in 1/freedom.
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _Z
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
