"""Which instances a step draws, and what it remembers of them."""

from __future__ import annotations

from collections import Counter

import pytest

from agentr_core.methods.grpo.rollouts import (
    RewardTally,
    choose_instances,
    contrast_probability,
    never_won,
    reward_tallies,
)
from agentr_core.types import Instance

INSTANCES = [Instance(environment="door", split="train", index=index) for index in range(8)]
KEYS = [instance.key for instance in INSTANCES]


def test_the_chance_of_contrast_by_hand() -> None:
    assert contrast_probability(0.5, 3) == pytest.approx(3 / 4)
    assert contrast_probability(0.25, 2) == pytest.approx(2 * 0.25 * 0.75)
    assert contrast_probability(0.0, 8) == contrast_probability(1.0, 8) == 0.0


def test_mixed_instances_come_first_and_mastered_ones_last() -> None:
    tallies = {
        KEYS[0]: RewardTally(won=4, missed=4),
        KEYS[1]: RewardTally(won=8),
        KEYS[2]: RewardTally(missed=8),
    }
    num_by_key = Counter(
        instance.key
        for seed in range(2000)
        for instance in choose_instances(INSTANCES[:4], tallies, count=1, group_size=8, seed=seed)
    )
    num_mixed, num_always, num_never, num_unknown = (num_by_key[key] for key in KEYS[:4])
    assert num_mixed > max(num_unknown, num_never)
    assert min(num_unknown, num_never) > 2 * num_always, "the policy improves: what it loses it may win later"
    assert num_always > 0, "nothing is given up for good"


def test_the_chance_of_being_chosen_by_hand() -> None:
    # One instance is won half of the time for sure, of the other nothing is known. Two episodes of
    # a rate t differ with a chance of 2t(1 - t), which is highest at a half.
    tallies = {KEYS[0]: RewardTally(won=1e9, missed=1e9)}
    for seed in range(50):
        assert choose_instances(INSTANCES[:2], tallies, count=1, group_size=2, seed=seed)[0].key == KEYS[0]


def test_tallies_let_earlier_groups_fade() -> None:
    outcomes = [(KEYS[0], 8, 0.5), (KEYS[1], 8, 1.0), (KEYS[0], 8, 1.0)]
    tallies = reward_tallies(outcomes, memory=0.5)
    assert tallies == {KEYS[0]: RewardTally(won=10.0, missed=2.0), KEYS[1]: RewardTally(won=8.0, missed=0.0)}


def test_a_draw_depends_on_its_seed_alone_and_puts_nothing_back() -> None:
    for tallies in (None, {KEYS[0]: RewardTally(won=3, missed=1)}):
        instances = choose_instances(INSTANCES, tallies, count=5, group_size=8, seed=3)
        assert instances == choose_instances(INSTANCES, tallies, count=5, group_size=8, seed=3)
        assert instances != choose_instances(INSTANCES, tallies, count=5, group_size=8, seed=4)
        assert len(set(instances)) == 5


def test_without_knowledge_all_have_the_same_chance() -> None:
    keys = [choose_instances(INSTANCES, None, count=1, group_size=8, seed=seed)[0].key for seed in range(4000)]
    assert keys.count(KEYS[2]) / len(keys) == pytest.approx(1 / 8, abs=0.02)


def test_chosen_ones_come_again_only_when_there_are_no_others() -> None:
    avoid = set(KEYS[:5])
    keys = [
        instance.key for instance in choose_instances(INSTANCES, {}, count=10, group_size=8, seed=1, avoided_keys=avoid)
    ]
    assert set(keys[:3]) == set(KEYS[5:])
    assert set(keys[3:8]) == avoid
    assert keys[8:] == keys[:2]


def test_lost_is_what_was_played_and_never_rewarded() -> None:
    tallies = {
        INSTANCES[0].key: RewardTally(won=0.0, missed=8.0),
        INSTANCES[1].key: RewardTally(won=0.01, missed=99.0),
        INSTANCES[2].key: RewardTally(won=8.0, missed=0.0),
    }
    assert never_won(INSTANCES, tallies) == [INSTANCES[0]], "of the others, nothing is known"
    assert never_won(INSTANCES, {}) == []
