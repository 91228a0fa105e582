"""The fast selection against one that compares every question with every other."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.methods.et_agent.selection import crowding, dispersion, fronts, select_by_front

COORDINATE = st.one_of(st.integers(0, 4).map(float), st.floats(0, 3))
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), min_size=0, max_size=40)
GROUPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0.0, 0.4, 0.8, 1.0]), min_size=4, max_size=4),
        st.lists(st.integers(0, 6), min_size=4, max_size=4),
    ),
    min_size=1,
    max_size=25,
)

Point = tuple[float, float]


def dominates(one: Point, other: Point) -> bool:
    return one[0] >= other[0] and one[1] >= other[1] and one != other


def peel(points: list[Point]) -> list[int]:
    """Return the front of each point, by taking away what nothing left dominates."""
    ranks, rest, front = [-1] * len(points), set(range(len(points))), 0
    while rest:
        free = {i for i in rest if not any(dominates(points[j], points[i]) for j in rest)}
        for i in free:
            ranks[i] = front
        rest -= free
        front += 1
    return ranks


def lonely(points: list[Point]) -> list[float]:
    """Return crowding distances as NSGA-II defines them, one neighbour at a time."""
    distance = [0.0] * len(points)
    for axis in (0, 1):
        order = sorted(range(len(points)), key=lambda i: points[i][axis])
        span = points[order[-1]][axis] - points[order[0]][axis]
        for place, i in enumerate(order if span > 0 else ()):
            inner = 0 < place < len(order) - 1
            near = points[order[place + 1]][axis] - points[order[place - 1]][axis] if inner else np.inf
            distance[i] += near / span if inner else np.inf
    return distance


@given(POINTS)
def test_fronts_are_those_of_peeling(points: list[Point]) -> None:
    assert list(fronts(np.array(points, dtype=np.float64).reshape(-1, 2))) == peel(points)


@given(POINTS.filter(bool))
def test_crowding_is_the_definition(points: list[Point]) -> None:
    assert np.allclose(crowding(np.array(points, dtype=np.float64)), lonely(points))


@given(GROUPS, st.integers(0, 30), st.booleans(), st.randoms(use_true_random=False))
def test_selection_is_that_of_brute_force_whatever_the_order(
    groups: list[tuple[list[float], list[int]]], n: int, mixed_only: bool, rng: Random
) -> None:
    correctness = np.array([group[0] for group in groups], dtype=np.float64)
    calls = np.array([group[1] for group in groups], dtype=np.float64)
    names = [f"q{number:02}" for number in range(len(groups))]
    selection = select_by_front(names, correctness, calls, n, mixed_only=mixed_only)

    candidates = [i for i, row in enumerate(correctness) if not mixed_only or (row.max() >= 0.75 > row.min())]
    points = [(dispersion(correctness)[i], dispersion(calls)[i]) for i in candidates]
    ranks = peel(points)
    expected: list[int] = []
    for front in range(max(ranks, default=-1) + 1):
        inside = [index for index, rank in enumerate(ranks) if rank == front]
        far = lonely([points[index] for index in inside])
        if len(expected) + len(inside) > n:
            inside = [index for _, index in sorted(zip((-d for d in far), inside, strict=True))][: n - len(expected)]
        expected += [candidates[index] for index in inside]
    assert sorted(np.flatnonzero(selection.selected)) == sorted(expected)

    order = list(range(len(groups)))
    rng.shuffle(order)
    second_selection = select_by_front(
        [names[i] for i in order], correctness[order], calls[order], n, mixed_only=mixed_only
    )
    assert {names[order[i]] for i in np.flatnonzero(second_selection.selected)} == {names[i] for i in expected}
