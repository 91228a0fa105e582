"""Which questions are selected: the method's own example, and the edges."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import numpy as np
import pytest

from agentr_core.errors import DataFault
from agentr_core.methods.et_agent.report import _fronts_table
from agentr_core.methods.et_agent.selection import (
    Selection,
    crowding,
    dispersion,
    fronts,
    is_mixed,
    select_at_random,
    select_by_front,
    selection_reasons,
)
from agentr_core.store.codec.samples import SelectionOutcome

IDS = ["A", "B", "C", "D"]
CORRECTNESS = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=np.float64)
CALLS = np.array([[1, 3, 1, 3], [0, 4, 0, 4], [1, 1, 1, 1], [2, 2, 2, 2]], dtype=np.float64)


def names(found: Selection, marks: np.ndarray) -> str:
    return "".join(name for name, mark in zip(IDS, marks, strict=True) if mark)


def test_the_example_of_the_method() -> None:
    selection = select_by_front(IDS, CORRECTNESS, CALLS, 2, mixed_only=False)
    assert [names(selection, selection.rank == front) for front in range(3)] == ["AB", "D", "C"]
    assert names(selection, selection.selected) == "AB"
    assert selection.correctness_spread == pytest.approx([0.5, 0, np.sqrt(3) / 4, 0.5])
    assert list(selection.calls_spread) == [1, 2, 0, 0]


def test_the_filter_of_mixed_groups_comes_before_the_choice() -> None:
    selection = select_by_front(IDS, CORRECTNESS, CALLS, 2)
    assert names(selection, selection.selected) == "AD"
    assert selection.rank[1] == -1
    assert np.isnan(selection.crowding[1])


def test_each_question_has_a_reason() -> None:
    selection = select_by_front(IDS, CORRECTNESS, CALLS, 1, mixed_only=False)
    assert names(selection, selection.selected) == "A"
    assert selection_reasons(selection) == ["chosen", "crowded", "dominated", "dominated"]
    assert selection_reasons(select_by_front(IDS, CORRECTNESS, CALLS, 2)) == ["chosen", "alike", "dominated", "chosen"]
    assert selection_reasons(select_by_front([], np.zeros((0, 4)), np.zeros((0, 4)), 2)) == []


def test_a_random_draw_is_among_what_the_filter_leaves_and_goes_by_the_seed_alone() -> None:
    draws = {names(selection, selection.selected) for selection in (drawing(seed) for seed in range(20))}
    assert draws == {"A", "C", "D"}
    assert selection_reasons(drawing(0), at_random=True).count("not-drawn") == 2
    assert selection_reasons(drawing(0), at_random=True)[1] == "alike"
    reverse = select_at_random(IDS[::-1], CORRECTNESS[::-1], CALLS[::-1], 1, seed=3)
    assert list(reverse.selected[::-1]) == list(drawing(3).selected)


def drawing(seed: int) -> Selection:
    return select_at_random(IDS, CORRECTNESS, CALLS, 1, seed=seed)


def test_a_group_is_mixed_by_its_right_and_wrong_answers() -> None:
    rows = np.array([[0, 1], [1, 1], [0, 0], [0.74, 0.75], [0.1, 0.7], [0.8, 0.9]])
    assert list(is_mixed(rows)) == [True, False, False, True, False, False]


def test_dispersion_is_exact_where_it_can_be() -> None:
    thirds = np.full((1, 7), 1 / 3)
    assert dispersion(thirds)[0] == 0
    mirrors = np.array([[0] * 11 + [1] * 5, [1] * 11 + [0] * 5], dtype=np.float64)
    assert dispersion(mirrors)[0] == dispersion(mirrors)[1] == pytest.approx(np.std(mirrors[0]))
    shifts = np.array([[1, 3, 1, 3, 2], [91, 93, 91, 93, 92]], dtype=np.float64)
    assert len(set(dispersion(shifts))) == 1


def test_the_last_front_is_cut_by_crowding_and_then_by_id() -> None:
    line = np.array([[0, 4], [1, 3], [1.5, 2.5], [4, 0]], dtype=np.float64)
    assert list(crowding(line)) == [np.inf, pytest.approx(0.75), pytest.approx(1.5), np.inf]
    assert list(crowding(np.ones((3, 2)))) == [0, 0, 0], "a coordinate without a range counts nothing"
    same = select_by_front(["c", "a", "b"], CORRECTNESS[[0, 0, 0]], CALLS[[0, 0, 0]], 2)
    assert list(same.selected) == [False, True, True]


def test_few_questions_or_none() -> None:
    assert select_by_front(IDS, CORRECTNESS, CALLS, 99).selected.sum() == 3
    assert select_by_front(IDS, CORRECTNESS, CALLS, 0).selected.sum() == 0
    assert len(select_by_front([], np.zeros((0, 4)), np.zeros((0, 4)), 5).rank) == 0
    assert len(fronts(np.zeros((0, 2)))) == 0
    selection = select_by_front(["a"], np.ones((1, 4)), np.ones((1, 4)), 1)
    assert not selection.selected.any()


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(DataFault, match="one id"):
        select_by_front(["a", "a"], CORRECTNESS[:2], CALLS[:2], 1)
    with pytest.raises(DataFault, match="3 questions"):
        select_by_front(["a", "b", "c"], CORRECTNESS, CALLS, 1)


@pytest.mark.slow
def test_a_hundred_thousand_questions_take_less_than_two_seconds() -> None:
    rng = np.random.default_rng(0)
    n, rollouts = 100_000, 16
    ids = [f"question-{number}" for number in range(n)]
    correctness = rng.random((n, rollouts))
    calls = rng.integers(0, 13, (n, rollouts)).astype(np.float64)
    start = process_time()
    selection = select_by_front(ids, correctness, calls, 8000)
    seconds = process_time() - start
    assert selection.selected.sum() == 8000
    # Of processor time, so that a busy machine does not count. A quadratic sort takes an hour.
    assert seconds < 2, f"{seconds:.2f} s"


def test_a_report_counts_fronts_as_the_store_does() -> None:
    outcome = SelectionOutcome(
        instance_id="q",
        episodes=4,
        correctness=0.5,
        cost=1.0,
        s_corr=0.5,
        s_tool=0.0,
        front=0,
        crowding=None,
        selected=True,
        reason="chosen",
    )
    outcomes = [replace(outcome, front=front) for front in (9, 0, 5, None)]
    assert [row.cells[0] for row in _fronts_table(outcomes).rows] == ["0", "5", "6 and later", "none"]
