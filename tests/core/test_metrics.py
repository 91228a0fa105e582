"""Metrics against values worked out by hand or taken from tables."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations
from statistics import stdev

import pytest

from agentr_core.evaluation.metrics import (
    clustered_mean,
    clustered_share,
    count_loops,
    is_stuck,
    mean_over_seeds,
    mean_reward,
    mean_steps_to_success,
    measure_loops,
    pass_at,
    powers_of_two,
    reward_with_disasters,
    success_rate,
    t_quantile,
)
from agentr_core.types import Instance, Step, StopReason, Trajectory


def trajectory(steps: int, success: bool) -> Trajectory:
    step = Step(reply="r", action="a", observation="o", reward=float(success))
    return Trajectory(
        instance=Instance(environment="e", split="s", index=0),
        first_observation="",
        steps=(step,) * steps,
        reward=float(success),
        success=success,
        stop=StopReason.SUCCESS if success else StopReason.STEP_LIMIT,
    )


def test_wilson_interval_of_a_textbook_case() -> None:
    rate = success_rate([True] * 8 + [False] * 2)
    # centre (0.8 + 3.8415/20) / 1.38415 = 0.71674, half width 0.22659
    assert (rate.mean, rate.n) == (0.8, 10)
    assert (rate.low, rate.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize("n", [1, 3, 100])
def test_wilson_interval_at_the_ends(n: int) -> None:
    none, every = success_rate([False] * n), success_rate([True] * n)
    assert (none.low, every.high) == (0.0, 1.0)
    assert none.high == pytest.approx(1 - every.low)
    assert 0 < none.high < 1


def test_nothing_gives_nan_and_not_zero() -> None:
    assert math.isnan(success_rate([]).mean)
    assert math.isnan(mean_reward([]).mean)
    assert math.isnan(mean_over_seeds([]).mean)
    assert math.isnan(mean_steps_to_success([trajectory(3, False)]))
    assert math.isnan(measure_loops([]).stuck_share)


def test_bootstrap_is_repeatable_and_near_the_normal_interval() -> None:
    rewards = [0.0, 0.25, 0.5, 0.75, 1.0] * 20
    estimate, same_seed, other_seed = (mean_reward(rewards, seed=s) for s in (1, 1, 2))
    assert estimate == same_seed
    assert estimate != other_seed
    assert estimate.mean == 0.5
    half = 1.96 * math.sqrt(0.125 / 100)
    assert estimate.low == pytest.approx(0.5 - half, abs=0.01)
    assert estimate.high == pytest.approx(0.5 + half, abs=0.01)
    constant = mean_reward([1.0, 1.0])
    assert (constant.low, constant.high) == (1.0, 1.0)


def test_steps_to_success_are_those_of_successes() -> None:
    episodes = [trajectory(2, True), trajectory(4, True), trajectory(9, False), trajectory(9, False)]
    assert mean_steps_to_success(episodes) == 3.0


@pytest.mark.parametrize(
    ("actions", "length", "expected"),
    [
        ("aaa", 1, 2),
        ("abab", 1, 0),
        ("abab", 2, 1),
        ("ababab", 2, 3),  # at positions 2, 3 and 4
        ("abcabc", 3, 1),
        ("abc", 2, 0),
        ("", 1, 0),
    ],
)
def test_loops_by_hand(actions: str, length: int, expected: int) -> None:
    assert count_loops(list(actions), length) == expected


@pytest.mark.parametrize(
    ("actions", "stuck"),
    [("aab", False), ("baaa", True), ("abab", False), ("xababab", True), ("abcdeabcdeabcde", True), ("abcabc", False)],
)
def test_stuck_means_three_times_in_a_row(actions: str, stuck: bool) -> None:
    assert is_stuck(list(actions)) is stuck


def test_loops_over_episodes() -> None:
    loops = measure_loops([list("aaa"), list("abc")])
    assert loops.per_episode == {1: 1.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0}
    assert loops.stuck_share == 0.5


def test_an_interval_over_clusters_is_the_usual_one_where_each_value_is_its_own() -> None:
    values = [0.0, 1.0, 1.0, -1.0, 0.0, 1.0, 0.0, 0.0]
    alone = clustered_mean(values, list("abcdefgh"))
    half = t_quantile(7) * stdev(values) / math.sqrt(8)
    assert (alone.mean, alone.low, alone.high) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    # Four copies of each value are no more evidence than one, but for the correction of few
    # clusters.
    copies = clustered_mean([v for v in values for _ in range(4)], [c for c in "abcdefgh" for _ in range(4)])
    assert (copies.low, copies.high, copies.n) == pytest.approx((alone.low, alone.high, 32))
    assert math.isnan(clustered_mean([1.0, 0.0], ["a", "a"]).low)
    few = clustered_share([0.0, 0.0, 0.0, 1.0], list("abcd"))
    assert (few.low, few.mean, few.high) == (0.0, 0.25, 1.0)
    assert clustered_mean([0.0, 0.0, 0.0, 1.0], list("abcd")).high > 1
    assert math.isnan(clustered_share([1.0, 0.0], ["a", "a"]).high)
    assert clustered_mean([], []).n == 0


def test_a_share_that_is_the_same_in_all_clusters_is_not_certain() -> None:
    never = clustered_share([0.0] * 40, [str(number // 2) for number in range(40)])
    assert (never.mean, never.low, never.n) == (0.0, 0.0, 40)
    assert never.high == pytest.approx(success_rate([False] * 20).high)
    half = clustered_share([0.0, 1.0] * 20, [str(number // 2) for number in range(40)])
    assert half.low < 0.5 < half.high


def test_pass_at_k_is_the_chance_over_all_choices_of_k_episodes() -> None:
    for num_episodes, num_wins in ((4, 0), (5, 2), (6, 6), (8, 1)):
        outcomes = [True] * num_wins + [False] * (num_episodes - num_wins)
        for k in range(1, num_episodes + 1):
            choices = list(combinations(outcomes, k))
            assert pass_at(k, num_episodes, num_wins) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert [powers_of_two(most) for most in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_interval_over_seeds() -> None:
    estimate = mean_over_seeds([0.4, 0.5, 0.6])
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert math.isnan(mean_over_seeds([0.4]).low)


def test_t_quantiles_join_their_expansion_and_the_normal() -> None:
    assert t_quantile(1) == 12.7062
    assert t_quantile(31) == pytest.approx(2.0395, abs=1e-4)
    assert t_quantile(120) == pytest.approx(1.9799, abs=1e-4)
    values = [t_quantile(f) for f in range(1, 60)]
    assert values == sorted(values, reverse=True)


def test_a_disaster_counts_in_a_mean_what_the_recipe_says() -> None:
    win = trajectory(2, True)
    disaster = dataclasses.replace(trajectory(1, False), stop=StopReason.DISASTER)
    rewards = [reward_with_disasters(episode, -1.0) for episode in (win, disaster, trajectory(3, False))]
    assert rewards == [1.0, -1.0, 0.0]
    assert mean_reward(rewards).mean == 0.0
    assert reward_with_disasters(disaster, 0.0) == 0.0
