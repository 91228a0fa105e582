"""Which questions a stage of reinforcement learning trains on: those whose rollouts differ most, in
correctness and in the number of tool calls.

The rollouts of a question are a group of K. Its two objectives, both to be maximised, are the
dispersion of correctness and that of the number of calls over the group. Questions are taken by
Pareto front, best front first; the front that would exceed the number wanted is cut by crowding
distance. Sources: ET-Agent (arXiv 2601.06860), section on group-wise Pareto sampling; NSGA-II (Deb
et al. 2002) for fronts and crowding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentr_core.errors import DataFault

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RIGHT_FROM = 0.75
"""The lowest correctness of a right answer in the filter of mixed groups; where it can only be 0 or
1, that is 1.
"""
_DIGITS = 12
"""Digits that dispersions are rounded to: those that are mathematically equal must be equal
numbers, or one would dominate the other.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Selection:
    """The outcome for each question, in the order given.

    `correctness` and `calls` are the dispersions. `rank` counts fronts from 0; it is -1 for a
    question that the filter left out. `crowding` is the distance within the front, infinite at its
    ends and NaN for a question that was left out. `selected` marks the N questions.
    """

    correctness: Floats
    calls: Floats
    rank: Ints
    crowding: Floats
    selected: NDArray[np.bool_]


def select(ids: Sequence[str], correctness: Floats, calls: Floats, n: int, *, mixed_only: bool = True) -> Selection:
    """Return which `n` questions are trained on; all of them if there are fewer.

    The filter is applied before the choice, so it does not reduce the number chosen. Questions with
    equal crowding distance are taken by id, so that the order in which they are given does not
    matter.

    Args:
        ids: one for each question, all different.
        correctness: of each rollout, in [0, 1]; a row for each question.
        calls: how many tool calls each rollout made; of the same shape.
        mixed_only: leave out questions whose rollouts are all right or all wrong.

    Raises `DataFault` if shapes or ids are wrong.
    """
    if correctness.ndim != 2 or correctness.shape != calls.shape or len(ids) != len(correctness):
        raise DataFault(
            f"{len(ids)} questions have correctness of shape {correctness.shape} and calls of {calls.shape}; "
            "give each question a row of one number for each rollout"
        )
    if len(set(ids)) != len(ids):
        raise DataFault("two questions have one id; select each question once")
    spread = np.column_stack([dispersion(correctness), dispersion(calls)])
    rank = np.full(len(ids), -1, dtype=np.int64)
    distance = np.full(len(ids), np.nan)
    # From here on questions stand in the order of their ids, which settles every tie.
    order = np.argsort(np.asarray(ids, dtype=np.str_), kind="stable")
    if mixed_only:
        order = order[mixed(correctness[order])]
    rank[order] = fronts(spread[order])
    chosen: list[int] = []
    for front in _members(rank, order):
        distance[front] = crowding(spread[front])
        left = n - len(chosen)
        if left < len(front):
            front = front[np.argsort(-distance[front], kind="stable")][: max(0, left)]
        chosen.extend(front)
    selected = np.zeros(len(ids), dtype=np.bool_)
    selected[chosen] = True
    return Selection(correctness=spread[:, 0], calls=spread[:, 1], rank=rank, crowding=distance, selected=selected)


def draw(
    ids: Sequence[str], correctness: Floats, calls: Floats, n: int, *, mixed_only: bool = True, seed: int
) -> Selection:
    """Return `n` questions drawn at random, independent of the order in which they are given: the
    baseline for `select`.

    All questions that pass the filter are in front 0, and crowding is not known. Arguments and
    errors are those of `select`.
    """
    # Selecting all questions gives the dispersions, and shows which the filter leaves.
    whole = select(ids, correctness, calls, len(ids), mixed_only=mixed_only)
    fit = sorted(np.flatnonzero(whole.selected).tolist(), key=lambda place: ids[place])
    chosen = np.random.default_rng(seed).permutation(len(fit))[:n]
    selected = np.zeros(len(ids), dtype=np.bool_)
    selected[[fit[place] for place in chosen]] = True
    return replace(whole, rank=np.where(whole.selected, 0, -1), crowding=np.full(len(ids), np.nan), selected=selected)


def reasons(found: Selection, *, drawn: bool = False) -> list[str]:
    """Return why each question was chosen or not, as a word: `chosen`; `alike`, which the filter
    left out; `crowded`, in the front that was cut; `dominated`, in one after it; or `not-drawn`.
    """
    last = int(found.rank[found.selected].max(initial=0))
    words = []
    for rank, selected in zip(found.rank.tolist(), found.selected.tolist(), strict=True):
        missed = "not-drawn" if drawn else "crowded" if rank == last else "dominated"
        words.append("chosen" if selected else "alike" if rank < 0 else missed)
    return words


def dispersion(values: Floats) -> Floats:
    """Return the population standard deviation of each row; it is the same for permuted rows.

    The published code takes the variance, which gives the same fronts but other crowding distances.
    """
    if not values.size:
        return np.zeros(len(values))
    # Sorted and measured from the least: whole numbers stay whole, and equal values give 0.
    apart = np.sort(values, axis=1)
    apart = apart - apart[:, :1]
    size = values.shape[1]
    scaled = size * (apart**2).sum(axis=1) - apart.sum(axis=1) ** 2
    rounded: Floats = np.round(np.sqrt(np.maximum(scaled, 0.0)) / size, _DIGITS)
    return rounded


def mixed(correctness: Floats) -> NDArray[np.bool_]:
    """Return which rows have both right answers (at least `RIGHT_FROM`) and wrong ones."""
    right = correctness >= RIGHT_FROM
    found: NDArray[np.bool_] = np.logical_xor(right.any(axis=1), right.all(axis=1))
    return found


def fronts(points: Floats) -> Ints:
    """Return the number of the front of each point, from 0, in O(n log n); both coordinates are to
    be maximised.

    A point dominates another if it is at least as good in both and better in one. Front 0 holds the
    points that no point dominates, front k those that only points of earlier fronts dominate.
    """
    if not len(points):
        return np.zeros(0, dtype=np.int64)
    # Equal points share a front, and `unique` sorts: by the first coordinate, then by the second.
    different, place = np.unique(points, axis=0, return_inverse=True)
    ranks = np.empty(len(different), dtype=np.int64)
    # In a sweep from the best first coordinate down, a front dominates a point if and only if one
    # of its points is at least as high. The highest points of the fronts so far decrease from front
    # to front.
    lows: list[float] = []
    for position in range(len(different) - 1, -1, -1):
        low = -float(different[position, 1])
        rank = bisect_right(lows, low)
        if rank == len(lows):
            lows.append(low)
        else:
            lows[rank] = low
        ranks[position] = rank
    return ranks[place.reshape(-1)]


def crowding(points: Floats) -> Floats:
    """Return the crowding distance of each point of a front: the sum over coordinates of the
    distance between its neighbours, in units of the range.

    The distance at the ends of a coordinate is infinite. A coordinate in which all points are equal
    adds nothing. Of equal values the earlier point comes first.
    """
    distance = np.zeros(len(points))
    for values in points.T:
        order = np.argsort(values, kind="stable")
        low, high = values[order[[0, -1]]] if len(order) else (0.0, 0.0)
        if high > low:
            distance[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / (high - low)
            distance[order[[0, -1]]] = np.inf
    return distance


def _members(rank: Ints, order: Ints) -> list[Ints]:
    """Return the questions of each front, from front 0, within a front in the given order."""
    if not len(order):
        return []
    by_front = order[np.argsort(rank[order], kind="stable")]
    return np.split(by_front, np.flatnonzero(np.diff(rank[by_front])) + 1)
