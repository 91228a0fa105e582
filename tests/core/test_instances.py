"""Which instances an iteration collects from: drawn anew or the same ones, from a whole split or a
part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from asked import asked_for
from toy import Line

from agentr_core.environment import Instances
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.faults import parse
from agentr_core.recipes.recipe import Recipe, identifying_data, resolved
from agentr_core.runtime.instances import held_out_instances, training_instances
from agentr_core.types import Instance


class NumberedLine(Line):
    """A world whose training split has given numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def instances(self, split: str) -> Sequence[Instance]:
        return Instances(self.name, split, self.numbers)


def recipe(*overrides: str, **instances: Any) -> Recipe:
    return parse({"name": "r", "model": {"path": "m"}, "instances": instances}, overrides)


def draw_indices(made: Recipe, iteration: int = 1, numbers: Sequence[int] = range(100)) -> list[int]:
    return [instance.index for instance in training_instances(made, NumberedLine(numbers), iteration)]


def test_each_iteration_draws_anew_or_all_take_the_same_instances() -> None:
    fresh_recipe, fixed_recipe = recipe(train_limit=10), recipe(train_limit=10, draw="fixed")
    assert draw_indices(fresh_recipe, 1) != draw_indices(fresh_recipe, 2)
    assert (
        draw_indices(fixed_recipe, 1)
        == draw_indices(fixed_recipe, 2)
        == draw_indices(fixed_recipe, 9)
        == draw_indices(fresh_recipe, 1)
    )


def test_only_is_a_range_without_its_end_or_a_list() -> None:
    assert draw_indices(recipe(only="[3, 7)")) == [3, 4, 5, 6]
    assert draw_indices(recipe(only=[9, 3, 12])) == [3, 9, 12]
    assert draw_indices(recipe("instances.only=[3, 7)")) == [3, 4, 5, 6]
    assert draw_indices(recipe("instances.only=[5, 6]")) == [5, 6]
    assert set(draw_indices(recipe(only="[0, 50)", train_limit=10))) < set(range(50))


def test_numbers_are_those_of_the_world_and_not_positions() -> None:
    numbers = [31, 40, 33, 500]
    assert draw_indices(recipe(only="[0, 100)"), numbers=numbers) == [31, 40, 33]
    assert draw_indices(recipe(only=[500, 33]), numbers=numbers) == [33, 500]


def test_a_part_of_an_endless_split_is_found_at_once() -> None:
    assert draw_indices(recipe(only="[1000000000, 1000000003)"), numbers=range(2**40)) == list(range(10**9, 10**9 + 3))


def test_a_range_beyond_the_split_is_as_quick() -> None:
    assert draw_indices(recipe(only="[98, 9999999999999)")) == [98, 99]


def test_an_endless_split_is_not_taken_whole() -> None:
    with pytest.raises(ConfigError, match=r"split train has 70,000,000 instances, .*; set instances.train_limit"):
        draw_indices(recipe(train_limit=0), numbers=range(70_000_000))
    with pytest.raises(ConfigError, match=r"split test has 70,000,000 instances, .*; set instances.test_limit"):
        held_out_instances(recipe(), NumberedLine(range(70_000_000)))


class DepthWorld(NumberedLine):
    """A world of three depths; a tenth of its instances has depth 3."""

    def depth(self, instance: Instance) -> int | None:
        return 3 if instance.index % 10 == 0 else 1 + instance.index % 2


def draw_depths(made: Recipe, iteration: int = 1, size: int = 1000) -> list[int]:
    world = DepthWorld(range(size))
    return [world.depth(instance) or 0 for instance in training_instances(made, world, iteration)]


def test_each_depth_has_its_share() -> None:
    config = recipe("instances.depths={1: 0.15, 3: 0.5, 2: 0.35}", train_limit=21)
    assert Counter(draw_depths(config)) == {1: 3, 3: 11, 2: 7}
    assert Counter(draw_depths(config, size=70_000_000)) == {1: 3, 3: 11, 2: 7}
    chosen = [training_instances(config, DepthWorld(range(1000)), iteration) for iteration in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert [instance.index for instance in chosen[0]] == sorted({instance.index for instance in chosen[0]})


def test_shares_of_depths_are_drawn_from_the_named_part() -> None:
    config = recipe(only="[0, 100)", depths={3: 1.0}, train_limit=10)
    assert [instance.index for instance in training_instances(config, DepthWorld(range(1000)), 1)] == list(
        range(0, 100, 10)
    )


def test_too_few_of_a_depth_are_told() -> None:
    with pytest.raises(ConfigError, match=r"of 1,000 instances of split train, .* \(20 of depth 3 are missing\)"):
        draw_depths(recipe(depths={3: 0.6, 1: 0.4}, train_limit=200))
    with pytest.raises(ConfigError, match=r"4 of depth 7 are missing"):
        draw_depths(recipe(depths={7: 0.4, 1: 0.6}, train_limit=10), size=70_000_000)


def test_shares_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"instances.depths: the shares add up to 0.9; they must add up to 1"):
        recipe(depths={1: 0.5, 2: 0.4}, train_limit=10)
    with pytest.raises(ConfigError, match=r"instances.depths: shares of how many\? Set instances.train_limit"):
        recipe(depths={1: 1.0}, train_limit=0)
    with pytest.raises(ConfigError, match=r"instances.depths.1: give a number, not true"):
        recipe(depths={1: True}, train_limit=10)


class Split(DepthWorld):
    """Two training splits, of which one has only depths 1 and 2."""

    def instances(self, split: str) -> Sequence[Instance]:
        numbers = [number for number in range(1000) if number % 10 or split == "train"]
        return Instances(self.name, split, numbers)


def test_splits_are_mixed_in_shares() -> None:
    config = recipe("instances.mix={more: 0.25, other: 0.1}", train_limit=40)
    chosen = [training_instances(config, Split(()), iteration) for iteration in (1, 1, 2)]
    assert Counter(instance.split for instance in chosen[0]) == {"train": 26, "more": 10, "other": 4}
    assert len(set(chosen[0])) == 40
    assert chosen[0] == chosen[1] != chosen[2]
    assert parse(resolved(config)) == config
    reverse = recipe("instances.mix={other: 0.1, more: 0.25}", train_limit=40)
    assert training_instances(reverse, Split(()), 1) == chosen[0]


def test_each_split_of_a_mix_has_the_shares_of_depths() -> None:
    config = recipe("instances.mix={more: 0.5}", depths={1: 0.5, 2: 0.5}, train_limit=40)
    chosen = training_instances(config, Split(()), 1)
    assert Counter((instance.split, 1 + instance.index % 2) for instance in chosen) == dict.fromkeys(
        [("train", 1), ("train", 2), ("more", 1), ("more", 2)], 10
    )
    with pytest.raises(ConfigError, match=r"of 900 instances of split more, .* \(4 of depth 3 are missing\)") as error:
        training_instances(recipe("instances.mix={more: 0.5}", depths={3: 0.2, 1: 0.8}, train_limit=40), Split(()), 1)
    assert "split train" not in str(error.value)


@pytest.mark.parametrize(
    ("instances", "said"),
    [
        ({"mix": {"train": 0.5}}, r"instances.mix: train is the split train; name others only"),
        ({"mix": {"test": 0.5}}, r"instances.mix: test is the split test; name others only"),
        ({"mix": {"a": 0.5, "b": 0.5}}, r"instances.mix: the shares leave nothing for train"),
        ({"mix": {"a": 0.01}, "train_limit": 20}, r"instances.mix: a split has less than one instance"),
        ({"mix": {"a": 0.5}, "train_limit": 0}, r"instances.mix: a split has less than one instance"),
        ({"mix": {"a": 0.5}, "only": [1, 2]}, r"instances.mix: instances.only has numbers of one split"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(instances: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(**instances)


def test_a_split_of_a_mix_is_not_evaluated() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.sets.more.split: 'more' is the split that is trained on"):
        recipe("instances.mix={more: 0.5}", "evaluation.sets.more={split: more}")


class ExpertWorld(DepthWorld):
    """Its expert takes as many steps as the last digit of an instance says; 0 is out of reach."""

    def expert(self, instance: Instance) -> Sequence[str] | None:
        return ["go"] * (instance.index % 10) or None


def test_instances_take_the_expert_as_many_steps_as_wanted() -> None:
    config = recipe("instances.expert_steps=[3, 5]", train_limit=12)
    for size in (1000, 70_000_000):
        chosen = {instance.index for instance in training_instances(config, ExpertWorld(range(size)), 1)}
        assert len(chosen) == 12
        assert {index % 10 for index in chosen} == {3, 4, 5}


def test_steps_of_the_expert_and_depths_count_together() -> None:
    config = recipe("instances.expert_steps=[4, 7]", depths={1: 0.5, 2: 0.5}, train_limit=8)
    chosen = [instance.index for instance in training_instances(config, ExpertWorld(range(1000)), 1)]
    assert Counter(1 + index % 2 for index in chosen) == {1: 4, 2: 4}
    assert {index % 10 for index in chosen} <= {4, 5, 6, 7}


def test_too_few_of_so_many_steps_are_told() -> None:
    with pytest.raises(ConfigError, match=r"instances.expert_steps: of 1,000 .* \(20 are missing\); change this, or"):
        training_instances(recipe("instances.expert_steps=[11, 12]", train_limit=20), ExpertWorld(range(1000)), 1)
    config = recipe("instances.expert_steps=[3, 3]", depths={3: 1.0}, train_limit=20)
    with pytest.raises(ConfigError, match=r"depths and instances.expert_steps: .* \(20 of depth 3 are missing\)"):
        training_instances(config, ExpertWorld(range(1000)), 1)


def test_steps_of_the_expert_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"instances.expert_steps: the fewest steps come first, then the most"):
        recipe("instances.expert_steps=[9, 3]")
    with pytest.raises(ConfigError, match=r"instances.expert_steps: how many of these\? Set instances.train_limit"):
        recipe("instances.expert_steps=[3, 9]", train_limit=0)


def test_later_iterations_may_collect_from_others() -> None:
    later = "instances.from_iteration={2: {expert_steps: [4, 7]}, 4: {depths: {2: 1.0}}}"
    config = recipe(later, depths={1: 0.5, 2: 0.5}, train_limit=8)
    chosen = {
        i: [instance.index for instance in training_instances(config, ExpertWorld(range(1000)), i)] for i in range(1, 6)
    }
    assert any(index % 10 > 7 or index % 10 < 4 for index in chosen[1])
    for iteration in (2, 3, 4, 5):
        assert {index % 10 for index in chosen[iteration]} <= {4, 5, 6, 7}
    for iteration, depths in {1: {1, 2}, 2: {1, 2}, 3: {1, 2}, 4: {2}, 5: {2}}.items():
        assert {1 + index % 2 for index in chosen[iteration]} == depths
    assert list(config.instances.changing_iterations(3)) == [1, 2]


def test_later_iterations_may_collect_from_fewer() -> None:
    config = recipe("instances.from_iteration={2: {train_limit: 5}}", train_limit=20)
    assert [len(training_instances(config, ExpertWorld(range(1000)), i)) for i in (1, 2, 3)] == [20, 5, 5]
    with pytest.raises(ConfigError, match=r"instances.from_iteration.2.train_limit"):
        recipe("instances.from_iteration={2: {train_limit: 0}}")


def test_faults_of_later_iterations_say_from_when_on() -> None:
    with pytest.raises(ConfigError, match=r"from iteration 3 on, instances.expert_steps: the fewest steps come first"):
        recipe("instances.from_iteration={3: {expert_steps: [9, 3]}}")
    with pytest.raises(ConfigError, match=r"instances.from_iteration.1"):
        recipe("instances.from_iteration={1: {expert_steps: [3, 9]}}")
    with pytest.raises(ConfigError, match=r"evaluation.sets.more.split: 'more' is the split that is trained on"):
        recipe("instances.from_iteration={2: {mix: {more: 0.5}}}", "evaluation.sets.more={split: more}")


def test_a_recipe_with_other_instances_later_survives_storage() -> None:
    config = recipe("instances.from_iteration={2: {depths: {1: 0.25, 3: 0.75}}}", train_limit=10)
    assert parse(resolved(config)) == config
    assert identifying_data(config) != identifying_data(recipe(train_limit=10))
    assert "from_iteration" not in identifying_data(recipe(train_limit=10))["instances"]


def test_a_recipe_with_shares_of_depths_survives_storage() -> None:
    config = recipe(depths={1: 0.25, 3: 0.75}, train_limit=10)
    assert parse(resolved(config)) == config
    assert fingerprint(resolved(config)) == fingerprint(resolved(parse(resolved(config))))


def test_parts_together_are_the_whole() -> None:
    parts = [draw_indices(recipe(only=f"[{start}, {start + 25})", train_limit=0)) for start in range(0, 100, 25)]
    assert [index for part in parts for index in part] == draw_indices(recipe(train_limit=0))


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ([7, 1000], "split train of the environment has no instance 1000; it has 100 instances, numbered from 0 to 99"),
        ("[200, 300)", r"split train of the environment has none of \[200, 300\); it has 100 instances"),
    ],
)
def test_numbers_that_are_not_there_are_named(only: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_indices(recipe(only=only))


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("0-99", 'give a list of numbers, or a range as a text, such as "\\[0, 100\\)"'),
        ("[5, 5)", r"instances.only: the range \[5, 5\) is empty"),
        ([1, 2, 1], "instances.only: named twice: 1"),
        ([-1], r"recipe: instances.only.0: give 0 or more \(got -1\)"),
    ],
)
def test_what_is_no_range_is_refused(only: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(only=only)


def test_both_fields_are_part_of_what_a_run_is_once_they_are_set() -> None:
    ids = {
        fingerprint(asked_for(config))
        for config in (recipe(), recipe(only="[0, 5)"), recipe(only=[0, 1]), recipe(draw="fixed"))
    }
    assert len(ids) == 4
    assert fingerprint(asked_for(recipe(draw="fresh", only=[]))) == fingerprint(asked_for(recipe()))
    set_ = recipe(only="[0, 5)", draw="fixed")
    assert parse(resolved(set_)) == set_


class AliasWorld(NumberedLine):
    """A world whose split has ten instances, then the same ten under other names, and so on."""

    def origin(self, instance: Instance) -> Instance:
        return Instance(environment=self.name, split="test", index=instance.index % 10)


@pytest.mark.parametrize(("limit", "origins"), [(5, 5), (10, 10), (15, 10), (20, 10), (37, 10)])
def test_a_part_of_a_split_is_of_as_many_origins_as_there_are(limit: int, origins: int) -> None:
    """Even distances alone would take the first of every ten, or the first and sixth."""
    env = AliasWorld(range(200))
    chosen = held_out_instances(recipe(test_limit=limit), env)
    times = Counter(env.origin(instance).index for instance in chosen)
    assert len(times) == origins
    assert max(times.values()) - min(times.values()) <= 1
    bounds = [number * 200 // limit for number in range(limit + 1)]
    assert all(low <= instance.index < high for instance, low, high in zip(chosen, bounds, bounds[1:], strict=False))


def test_a_part_of_a_split_without_variants_is_at_even_distances() -> None:
    chosen = held_out_instances(recipe(test_limit=7), NumberedLine(range(100)))
    assert [instance.index for instance in chosen] == [position * 100 // 7 for position in range(7)]
