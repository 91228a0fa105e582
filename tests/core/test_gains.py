"""Differences between two models over the same episodes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from finished import after, played

from agentr_core.stages.evaluate import Measures, gains, mean_gain, measure
from agentr_core.store.codec.trajectories import Episode
from agentr_core.types import Trajectory


def test_the_interval_of_a_difference_ends_where_differences_of_shares_end() -> None:
    gain = mean_gain([(-1.0, "a"), (0.0, "b")])
    assert (gain.mean, gain.low, gain.high) == (-0.5, -1.0, 1.0)
    many = mean_gain([(1.0, f"{number}") for number in range(50)] + [(0.0, f"other {number}") for number in range(50)])
    assert many.mean == 0.5
    assert many.mean - many.low == pytest.approx(many.high - many.mean)
    assert math.isnan(mean_gain([(1.0, "a")]).low), "one cluster has no interval"


def test_equal_gains_are_not_certain() -> None:
    three, hundred = (mean_gain([(gain, str(number)) for number in range(n)]) for gain, n in ((1.0, 3), (0.0, 100)))
    assert (three.mean, three.high) == (1.0, 1.0)
    assert three.low < 0.5
    assert 0.03 < hundred.high < 0.05
    assert hundred.low == -hundred.high


def test_episodes_of_one_instance_are_no_independent_evidence() -> None:
    episodes = [
        replace(revision_episode(played(3, success=number % 2 == 0)), repeat=repeat, origin=str(number), cut=0)
        for number in range(40)
        for repeat in range(8)
    ]
    measures, once = measure(episodes), measure([episode for episode in episodes if episode.repeat == 0])
    assert measures["success"].mean == once["success"].mean == 0.5
    assert measures["success"].high - measures["success"].low > 0.9 * (once["success"].high - once["success"].low)
    assert measures["reward"].high - measures["reward"].low > 0.9 * (once["reward"].high - once["reward"].low)
    assert measures["success"] == measures["success_clustered"]


def test_equal_rewards_are_not_certain() -> None:
    def measures_of(*, success: bool, goals: int, repeats: int = 2) -> Measures:
        trajectories = {goal: played(3, success=success) for goal in range(goals)}
        return measure(
            [
                replace(
                    revision_episode(trajectory),
                    instance=replace(trajectory.instance, index=goal),
                    repeat=repeat,
                    origin=str(goal),
                    cut=0,
                )
                for goal, trajectory in trajectories.items()
                for repeat in range(repeats)
            ]
        )

    for success, goals in ((False, 40), (True, 3)):
        measures = measures_of(success=success, goals=goals)
        for name in ("reward", "best_of_2_reward", "mean_reward@2"):
            assert measures[name] == replace(measures["success"], n=measures[name].n), name
    once = measures_of(success=False, goals=40, repeats=1)
    assert once["reward"] == once["success"]
    assert 0.05 < once["reward"].high < 0.1
    two = measures_of(success=False, goals=1)["reward"]
    assert (two.low, two.high < 1.0) == (0.0, True)


def test_variants_of_one_instance_are_no_independent_evidence_of_several_episodes_either() -> None:
    def measures_of(variants: int) -> Measures:
        trajectories = {goal: played(3, success=goal % 2 == 0) for goal in range(40)}
        return measure(
            [
                replace(
                    revision_episode(trajectories[goal]),
                    instance=replace(trajectories[goal].instance, index=goal * variants + variant),
                    repeat=repeat,
                    origin=str(goal),
                    cut=0,
                )
                for goal in range(40)
                for variant in range(variants)
                for repeat in range(2)
            ]
        )

    alone, eight = measures_of(1), measures_of(8)
    for name in ("best_of_2_success", "best_of_2_reward", "always@2", "never@2"):
        assert alone[name].mean == eight[name].mean == 0.5
        assert eight[name].high - eight[name].low > 0.9 * (alone[name].high - alone[name].low), name


def revision_episode(trajectory: Trajectory, key: str = "t") -> Episode:
    return Episode(
        trajectory_id=key,
        instance=trajectory.instance,
        repeat=0,
        cut=1,
        trajectory=trajectory,
        origin=trajectory.instance.key,
    )


def test_episodes_of_revision_tests_are_the_same_where_their_given_steps_are() -> None:
    winner, loser = (played(3, success=success) for success in (True, False))
    now = [revision_episode(after("slip", winner))]
    assert [gain for gain, _ in gains(now, [revision_episode(after("slip", loser))])] == [1.0]
    assert gains(now, [revision_episode(after("fall", loser))]) == []
    failed_for_good = revision_episode(loser, key="")
    assert [gain for gain, _ in gains(now, [failed_for_good])] == [1.0], "counted as a failure without a step"
