"""UCT and back-up against values worked out by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from agentr_core.search.tree import back_up, best_children, descend, select_child, terminal_ancestors, uct
from agentr_core.types import Node, Step, StopReason


def node(index: int, parent: int = 0, **fields: object) -> Node:
    return Node(index=index, parent=parent, depth=0 if parent < 0 else 1, step=None, **fields)  # type: ignore[arg-type]


def leaf(index: int, parent: int, reward: float) -> Node:
    step = Step(reply="r", action="a", observation="o", reward=reward)
    return Node(index=index, parent=parent, depth=1, step=step, terminal=True, stop=StopReason.FAILURE)


@pytest.mark.parametrize(
    ("value_sum", "visits", "parent_visits", "exploration", "expected"),
    [
        (0.0, 0, 5, 0.25, math.inf),
        (1.0, 1, 1, 0.25, 1.0),  # ln 1 = 0
        (1.0, 2, 4, 0.25, 0.708138650),  # 0.5 + 0.25 * sqrt(ln 4 / 2) = 0.5 + 0.25 * 0.832554611
        (3.0, 4, 10, 1.0, 1.508713586),  # 0.75 + sqrt(ln 10 / 4) = 0.75 + 0.758713563
        (0.0, 3, 9, 0.0, 0.0),
    ],
)
def test_uct_by_hand(value_sum: float, visits: int, parent_visits: int, exploration: float, expected: float) -> None:
    score = uct(value_sum=value_sum, visits=visits, parent_visits=parent_visits, exploration=exploration)
    assert score == pytest.approx(expected, abs=1e-7)


def test_unvisited_children_come_first_and_terminal_ones_never() -> None:
    parent = node(0, -1, visits=9)
    children = [
        node(1, visits=8, value_sum=8.0),
        node(2, terminal=True),
        node(3),
        node(4),
    ]
    assert {child.index for child in best_children(parent, children, 0.25)} == {3, 4}
    assert select_child(parent, [children[1]], exploration=0.25, seed=0, dive=0) is None


def test_exploration_decides_between_a_good_and_a_rare_child() -> None:
    parent = node(0, -1, visits=11)
    children = [node(1, visits=10, value_sum=5.0), node(2, visits=1, value_sum=0.3)]
    assert [c.index for c in best_children(parent, children, 0.0)] == [1]
    assert [c.index for c in best_children(parent, children, 0.25)] == [2]  # 0.3 + 0.387 > 0.5 + 0.122


def test_ties_are_uniform_and_repeat_for_equal_keys() -> None:
    parent = node(0, -1)
    children = [node(1), node(2), node(3), node(4)]

    def pick(seed: int, dive: int) -> int:
        child = select_child(parent, children, exploration=0.25, seed=seed, dive=dive)
        assert child is not None
        return child.index

    counts = Counter(pick(seed, dive) for seed in range(100) for dive in range(8))
    assert all(150 < counts[index] < 250 for index in (1, 2, 3, 4))
    assert [pick(7, d) for d in range(8)] == [pick(7, d) for d in range(8)]


def test_descend_goes_to_the_unexpanded_node() -> None:
    nodes = [node(0, -1, visits=2), node(1, visits=2, value_sum=1.0), node(2, terminal=True), node(3, 1), leaf(4, 1, 1)]
    children = [[1, 2], [3, 4], [], [], []]
    assert descend(nodes, children, 0, exploration=0.25, seed=0, dive=0) == 3
    assert descend(nodes, children, 4, exploration=0.25, seed=0, dive=0) is None


def test_back_up_visits_the_leaf_and_every_ancestor_once() -> None:
    nodes = [node(0, -1, visits=1), node(1, 0), leaf(2, 1, 0.75), node(3, 0)]
    updates = back_up(nodes, 2)
    assert {i: (n.visits, n.value_sum) for i, n in updates.items()} == {0: (2, 0.75), 1: (1, 0.75), 2: (1, 0.75)}


def test_close_goes_up_only_while_every_child_is_terminal() -> None:
    nodes = [node(0, -1), node(1, 0), node(2, 1), leaf(3, 2, 0), node(4, 0)]
    children = [[1, 4], [2], [3], [], []]
    updates = terminal_ancestors(nodes, children, 2)
    assert set(updates) == {1, 2}  # node 4 is open, and so the root stays open
    assert all(n.terminal for n in updates.values())
    assert terminal_ancestors(nodes, children, 4) == {}  # an unexpanded node is not exhausted
