"""Pairs of paths: thresholds, caps, order, and the reasons for what was turned away."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from toy_paths import ToyTree

from agentr_core.methods.agent_r.pairs import distinct_paths, good_paths, num_shared_steps, pairs_of_tree
from agentr_core.recipes.agent_r import PairsConfig
from agentr_core.types import Instance, TreePath

RIGHT = "right"


def with_reward(path: TreePath, reward: float) -> TreePath:
    return replace(path, trajectory=replace(path.trajectory, reward=reward))


def ladder(*rewards: float) -> list[TreePath]:
    """Paths of different lengths and transcripts with given rewards."""
    tree = ToyTree(4)
    return [with_reward(tree.path(*["look"] * i, "left"), reward) for i, reward in enumerate(rewards)]


def pairs(
    paths: list[TreePath], alpha: float, config: PairsConfig | None = None, seed: int = 0
) -> set[tuple[float, float]]:
    selection, _ = pairs_of_tree("t", paths, config or PairsConfig(), alpha=alpha, seed=seed)
    return {(pair.good.trajectory.reward, pair.bad.trajectory.reward) for pair in selection}


def test_alpha_of_one_accepts_a_reward_of_one() -> None:
    assert pairs(ladder(1.0, 0.0), alpha=1.0) == {(1.0, 0.0)}
    # Eleven parts of a reward, added up, fall short of 1 by rounding alone.
    assert pairs(ladder(sum([1 / 11] * 11), 0.0), alpha=1.0) != set()
    assert pairs(ladder(0.99, 0.0), alpha=1.0) == set()


def test_alpha_is_at_least_or_more_than_and_the_whole_reward_is_always_enough() -> None:
    above = PairsConfig(alpha_rule="more_than")
    paths = ladder(0.8, 0.5, 0.0)
    assert pairs(paths, 0.5) == {(0.8, 0.5), (0.8, 0.0), (0.5, 0.0)}
    assert pairs(paths, 0.5, above) == {(0.8, 0.5), (0.8, 0.0)}
    assert pairs(ladder(1.0, 0.0), 1.0, above) == {(1.0, 0.0)}
    assert pairs(ladder(0.99, 0.0), 1.0, above) == set()
    assert [path.trajectory.reward for path in good_paths(paths, 0.5, "more_than")] == [0.8]


def test_the_published_order_is_the_same_for_every_seed_and_decides_under_the_caps() -> None:
    paths = ladder(1.0, 0.0, 1.0, 0.5)
    every, _ = pairs_of_tree("t", paths, PairsConfig(order="shuffled"), alpha=1.0, seed=5)
    assert len(every) == 4
    assert pairs_of_tree("u", paths, PairsConfig(order="shuffled"), alpha=1.0, seed=6)[0] == every
    capped_pairs, rejections = pairs_of_tree("t", paths, PairsConfig(order="shuffled", per_tree=3), alpha=1.0, seed=5)
    assert capped_pairs == every[:3]
    assert [r.reason for r in rejections] == ["per-tree-cap"]
    first_of = {pair.bad.leaf: pair for pair in reversed(every)}
    one_each, _ = pairs_of_tree("t", paths, PairsConfig(order="shuffled", per_bad_leaf=1), alpha=1.0, seed=5)
    assert sorted(p.bad.leaf for p in one_each) == sorted(first_of)
    assert all(pair == first_of[pair.bad.leaf] for pair in one_each)


def test_the_published_order_is_depth_first_and_asks_for_alpha_after_the_shuffle() -> None:
    """Leaves end breadth first here: 3 and 4 are below 1, which was drawn before leaf 2."""
    tree = ToyTree(4)
    early, late = with_reward(tree.path("left"), 0.0), with_reward(tree.path("look", "left"), 0.0)
    below = [replace(late, nodes=(1, 3)), replace(late, nodes=(1, 4))]
    below[1] = with_reward(replace(tree.path("look", "look"), nodes=(1, 4)), 0.6)
    paths = [with_reward(replace(tree.path("stop"), nodes=(2,)), 0.6), below[0], below[1], replace(early, nodes=(5,))]
    selection, _ = pairs_of_tree("t", paths, PairsConfig(order="published"), alpha=0.5, seed=0)
    expected = [((1, 4), (1, 3)), ((1, 4), (5,)), ((2,), (1, 3)), ((2,), (5,))]
    random.Random(123).shuffle(expected)
    assert [(pair.good.nodes, pair.bad.nodes) for pair in selection] == expected

    rising = ladder(1.0, 0.6, 0.3, 0.0)
    rising_pairs, _ = pairs_of_tree("t", rising, PairsConfig(order="published"), alpha=0.9, seed=0)
    every = [(1.0, 0.6), (1.0, 0.3), (1.0, 0.0), (0.6, 0.3), (0.6, 0.0), (0.3, 0.0)]
    random.Random(123).shuffle(every)
    rewards = [(pair.good.trajectory.reward, pair.bad.trajectory.reward) for pair in rising_pairs]
    assert rewards == [pair for pair in every if pair[0] == 1.0]
    # Shuffled among themselves, they are in another order.
    assert rising_pairs != pairs_of_tree("t", rising, PairsConfig(order="shuffled"), alpha=0.9, seed=0)[0]


def test_gap_and_absolute_line_differ() -> None:
    paths = ladder(1.0, 0.7, 0.4, 0.1)
    assert pairs(paths, 0.5, PairsConfig(beta=0.35)) == {(1.0, 0.4), (1.0, 0.1), (0.7, 0.1)}
    assert pairs(paths, 0.5, PairsConfig(beta=0.35, beta_rule="absolute")) == {(1.0, 0.1), (0.7, 0.1)}


def test_a_gap_of_exactly_beta_is_not_enough_whatever_the_rounding() -> None:
    assert 0.9 - 0.7 > 0.2
    assert pairs(ladder(0.9, 0.7), 0.5) == set()
    assert pairs(ladder(0.9, 0.69), 0.5) == {(0.9, 0.69)}


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((), "no-reward"), ((0.0, 0.0), "no-reward"), ((0.4, 0.0), "no-good-path"), ((1.0, 0.9), "no-bad-path")],
)
def test_a_tree_without_pairs_says_why(rewards: tuple[float, ...], reason: str) -> None:
    selection, rejections = pairs_of_tree("t", ladder(*rewards), PairsConfig(), alpha=0.5, seed=0)
    assert selection == ()
    assert [(r.subject, r.reason) for r in rejections] == [("t", reason)]
    assert rejections[0].detail


def test_caps_spread_over_bad_leaves_and_prefer_short_good_paths() -> None:
    paths = ladder(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    every, none = pairs_of_tree("t", paths, PairsConfig(), alpha=1.0, seed=5)
    assert (len(every), none) == (12, ())

    selection, rejections = pairs_of_tree("t", paths, PairsConfig(per_tree=6), alpha=1.0, seed=5)
    assert selection == every[:6]
    assert sorted(Counter(pair.bad.leaf for pair in selection).values()) == [1, 1, 2, 2]
    assert [len(pair.good.nodes) for pair in selection] == [1, 1, 1, 1, 2, 2]
    assert {r.reason for r in rejections} == {"per-tree-cap"}
    assert sum(r.detail.partition("left out: ")[2].count(",") + 1 for r in rejections) == 6

    one_each, rejections = pairs_of_tree("t", paths, PairsConfig(per_bad_leaf=1), alpha=1.0, seed=5)
    assert one_each == every[:4]
    assert [r.reason for r in rejections] == ["per-bad-leaf-cap"] * 4
    assert len({r.subject for r in rejections}) == 4


def test_the_order_is_a_function_of_instance_and_seed_whatever_the_tree_is_called() -> None:
    paths = ladder(1.0, 1.0, *[0.0] * 8)

    def order(tree: str, number: int, seed: int) -> tuple[tuple[int, int], ...]:
        instance = Instance(environment="toy", split="train", index=number)
        of_tree = [
            replace(path, tree_id=tree, trajectory=replace(path.trajectory, instance=instance)) for path in paths
        ]
        selection, _ = pairs_of_tree(tree, of_tree, PairsConfig(), alpha=1.0, seed=seed)
        return tuple((pair.good.leaf, pair.bad.leaf) for pair in selection)

    orders = {order("a", number, seed) for number in (1, 2) for seed in (0, 1)}
    assert len(orders) == 4
    assert len({frozenset(pairs) for pairs in orders}) == 1
    assert order("a", 1, 0) == order("b", 1, 0)


def test_identical_transcripts_count_once() -> None:
    # Independent episodes have nodes of their own, even when they say the same.
    good, bad = ToyTree(0).path(RIGHT, RIGHT), ToyTree(0).path("left")
    copy = replace(good, nodes=(8, 9))
    selection, rejections = pairs_of_tree("t", [good, copy, bad], PairsConfig(), alpha=1.0, seed=0)
    assert [(pair.good.leaf, pair.bad.leaf) for pair in selection] == [(good.leaf, bad.leaf)]
    assert [(r.subject, r.reason) for r in rejections] == [("t:9", "duplicate-transcript")]
    assert distinct_paths([good, bad]) == ((good, bad), ())
    assert good_paths([bad, good, copy], 1.0) == (good,)


def test_the_split_is_where_replies_or_observations_part() -> None:
    tree = ToyTree(1)
    first, second = tree.path(RIGHT, RIGHT, RIGHT), tree.path(RIGHT, "look", RIGHT)
    assert num_shared_steps(first, second) == 1
    assert num_shared_steps(first, tree.path(RIGHT, RIGHT, "stop")) == 2
    assert num_shared_steps(first, tree.path(RIGHT, RIGHT, RIGHT, thought="Another thought.")) == 0
    (pair,), _ = pairs_of_tree("t", [first, second], PairsConfig(), alpha=1.0, seed=0)
    assert pair.split == 1
