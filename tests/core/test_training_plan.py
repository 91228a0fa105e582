"""The plan of a training: which samples each step sees, and how many trained tokens that is."""

from __future__ import annotations

from collections import Counter

import pytest

from agentr_core.errors import DataFault
from agentr_core.training.packing import make_plan

TOKENS = [5, 1, 7, 3, 9, 2, 4]


def test_each_epoch_sees_every_row_once_in_another_order() -> None:
    plan = make_plan(TOKENS, per_step=3, epochs=2, max_tokens=0, seed=1)
    order = [row for step in plan.steps for row in step]

    assert sorted(order[:7]) == sorted(order[7:]) == list(range(7))
    assert order[:7] != order[7:]
    assert [len(step) for step in plan.steps] == [3, 3, 3, 3, 2]
    assert plan.epochs == 2


def test_a_step_may_be_as_many_tokens_as_packed_rows_hold() -> None:
    lengths = [10, 10, 30, 5, 40, 10, 100]
    plan = make_plan(TOKENS, per_step=3, epochs=2, max_tokens=0, seed=1, lengths=lengths, step_tokens=60)
    plain = make_plan(TOKENS, per_step=3, epochs=2, max_tokens=0, seed=1)

    assert [row for step in plan.steps for row in step] == [row for step in plain.steps for row in step]
    full = [sum(lengths[row] for row in step) for step in plan.steps]
    assert all(num_tokens <= 60 or len(step) == 1 for num_tokens, step in zip(full, plan.steps, strict=True))
    # No step ends while the next sample would still have had room in it.
    following = [lengths[step[0]] for step in plan.steps[1:]]
    assert all(num_tokens + num_more > 60 for num_tokens, num_more in zip(full, following, strict=False))
    assert plan.cumulative_tokens[-1] == plain.cumulative_tokens[-1] == 2 * sum(TOKENS)


def test_trained_tokens_are_counted_up_to_the_end_of_each_step() -> None:
    plan = make_plan(TOKENS, per_step=3, epochs=1, max_tokens=0, seed=1)

    sums = [sum(TOKENS[row] for row in step) for step in plan.steps]
    assert plan.cumulative_tokens == (sums[0], sums[0] + sums[1], 31)


def test_tokens_are_counted_on_when_the_plan_is_gone_through_again() -> None:
    plan = make_plan(TOKENS, per_step=3, epochs=1, max_tokens=0, seed=1)
    first, second, whole = plan.cumulative_tokens

    assert [plan.cumulative_tokens_after(step) for step in range(1, 8)] == [
        *(first, second, whole),
        *(whole + first, whole + second, whole + whole),
        whole + whole + first,
    ]


@pytest.mark.parametrize("budget", [1, 30, 31, 32, 100])
def test_a_token_budget_ends_with_the_sample_that_reaches_it(budget: int) -> None:
    plan = make_plan(TOKENS, per_step=2, epochs=5, max_tokens=budget, seed=4)
    last = TOKENS[plan.steps[-1][-1]]

    assert plan.cumulative_tokens[-1] - last < budget <= plan.cumulative_tokens[-1]


def test_a_budget_beyond_one_epoch_cycles_through_the_rows() -> None:
    plan = make_plan(TOKENS, per_step=4, epochs=1, max_tokens=62, seed=0)

    assert Counter(row for step in plan.steps for row in step) == Counter(dict.fromkeys(range(7), 2))
    assert plan.cumulative_tokens[-1] == 62
    assert plan.epochs == 2


def test_a_part_of_an_epoch_is_at_least_one_sample() -> None:
    assert make_plan(TOKENS, per_step=4, epochs=0.5, max_tokens=0, seed=0).epochs == pytest.approx(4 / 7)
    assert len(make_plan(TOKENS, per_step=4, epochs=0.01, max_tokens=0, seed=0).steps) == 1


def test_the_seed_decides_the_order() -> None:
    first, same, second = (make_plan(TOKENS, per_step=3, epochs=3, max_tokens=0, seed=seed) for seed in (1, 1, 2))

    assert first == same
    assert first != second


def test_rows_that_cannot_be_trained_on_are_refused() -> None:
    with pytest.raises(DataFault, match="no rows"):
        make_plan([], per_step=1, epochs=1, max_tokens=0, seed=0)
    with pytest.raises(DataFault, match=r"row 1 .* no trained token"):
        make_plan([3, 0], per_step=1, epochs=1, max_tokens=5, seed=0)
