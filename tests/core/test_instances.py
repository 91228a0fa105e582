"""Which instances an iteration collects from: drawn anew or the same ones, from a whole split or a
part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from toy import Line

from agentr_core.environments.instances import Instances
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes import Recipe, parse, resolved
from agentr_core.runtime.instances import held_out_instances, training_instances
from agentr_core.runtime.start import asked_for
from agentr_core.types import Instance


class Numbered(Line):
    """A world whose training split has given numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def instances(self, split: str) -> Sequence[Instance]:
        return Instances(self.name, split, self.numbers)


def recipe(*overrides: str, **instances: Any) -> Recipe:
    return parse({"name": "r", "model": {"path": "m"}, "instances": instances}, overrides)


def drawn(made: Recipe, iteration: int = 1, numbers: Sequence[int] = range(100)) -> list[int]:
    return [instance.index for instance in training_instances(made, Numbered(numbers), iteration)]


def test_each_iteration_draws_anew_or_all_take_the_same_instances() -> None:
    fresh, fixed = recipe(train_limit=10), recipe(train_limit=10, draw="fixed")
    assert drawn(fresh, 1) != drawn(fresh, 2)
    assert drawn(fixed, 1) == drawn(fixed, 2) == drawn(fixed, 9) == drawn(fresh, 1)


def test_only_is_a_range_without_its_end_or_a_list() -> None:
    assert drawn(recipe(only="[3, 7)")) == [3, 4, 5, 6]
    assert drawn(recipe(only=[9, 3, 12])) == [3, 9, 12]
    assert drawn(recipe("instances.only=[3, 7)")) == [3, 4, 5, 6]
    assert drawn(recipe("instances.only=[5, 6]")) == [5, 6]
    assert set(drawn(recipe(only="[0, 50)", train_limit=10))) < set(range(50))


def test_numbers_are_those_of_the_world_and_not_positions() -> None:
    numbers = [31, 40, 33, 500]
    assert drawn(recipe(only="[0, 100)"), numbers=numbers) == [31, 40, 33]
    assert drawn(recipe(only=[500, 33]), numbers=numbers) == [33, 500]


def test_a_part_of_an_endless_split_is_found_at_once() -> None:
    assert drawn(recipe(only="[1000000000, 1000000003)"), numbers=range(2**40)) == list(range(10**9, 10**9 + 3))


def test_a_range_beyond_the_split_is_as_quick() -> None:
    assert drawn(recipe(only="[98, 9999999999999)")) == [98, 99]


def test_an_endless_split_is_not_taken_whole() -> None:
    with pytest.raises(ConfigError, match=r"split train has 70,000,000 instances, .*; set instances.train_limit"):
        drawn(recipe(train_limit=0), numbers=range(70_000_000))
    with pytest.raises(ConfigError, match=r"split test has 70,000,000 instances, .*; set instances.test_limit"):
        held_out_instances(recipe(), Numbered(range(70_000_000)))


def test_parts_together_are_the_whole() -> None:
    parts = [drawn(recipe(only=f"[{start}, {start + 25})", train_limit=0)) for start in range(0, 100, 25)]
    assert [index for part in parts for index in part] == drawn(recipe(train_limit=0))


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ([7, 1000], "split train of the environment has no instance 1000; it has 100 instances, numbered from 0 to 99"),
        ("[200, 300)", r"split train of the environment has none of \[200, 300\); it has 100 instances"),
    ],
)
def test_numbers_that_are_not_there_are_named(only: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        drawn(recipe(only=only))


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("0-99", 'give a list of numbers, or a range as a text, such as "\\[0, 100\\)"'),
        ("[5, 5)", r"instances.only: the range \[5, 5\) is empty"),
        ([1, 2, 1], "instances.only: named twice: 1"),
        ([-1], "greater than or equal to 0"),
    ],
)
def test_what_is_no_range_is_refused(only: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(only=only)


def test_both_fields_are_part_of_what_a_run_is_once_they_are_set() -> None:
    ids = {
        fingerprint(asked_for(made))
        for made in (recipe(), recipe(only="[0, 5)"), recipe(only=[0, 1]), recipe(draw="fixed"))
    }
    assert len(ids) == 4
    assert fingerprint(asked_for(recipe(draw="fresh", only=[]))) == fingerprint(asked_for(recipe()))
    set_ = recipe(only="[0, 5)", draw="fixed")
    assert parse(resolved(set_)) == set_
