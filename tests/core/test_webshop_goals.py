"""Goals of WebShop: their texts, order and price bounds, and which split each is in."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from shop import entry, opened, write

from agentr_core.environments.webshop.goals import Goal, listed_goals, make_goals, product_price, split_goals
from agentr_core.environments.webshop.world import WebShop
from agentr_core.errors import ConfigError, DataFileError

ASKED = {"instruction": "Find me big mugs", "instruction_attributes": ["big"], "attributes": ["big"]}


def goal(number: int, row: int = 0) -> Goal:
    return Goal(row=row, instruction=f"goal {number}", attributes=("big",), options=(), price_bound=1.0)


def test_synthetic_goals_combine_all_options(tmp_path: Path) -> None:
    raw = [entry("B01", options={"size": ["s", "m"], "Color": ["red", "blue"]}), entry("B02"), entry("B03")]
    goals = make_goals(opened(tmp_path, raw, {"B01": ASKED, "B03": ASKED}), "synthetic", 233)

    texts = sorted(each.instruction.partition(", and price")[0] for each in goals)
    assert texts == [
        "Find me big mugs",
        "Find me big mugs with color: blue, and size: m",
        "Find me big mugs with color: blue, and size: s",
        "Find me big mugs with color: red, and size: m",
        "Find me big mugs with color: red, and size: s",
    ]
    assert {each.row for each in goals} == {0, 2}
    # One bound for all goals of a product, the greater of two of 10, 20, 30 and 40.
    for row in (0, 2):
        (bound,) = {each.price_bound for each in goals if each.row == row}
        assert bound in (20.0, 30.0, 40.0)
        assert all(each.instruction.endswith(f"lower than {bound:.2f} dollars") for each in goals if each.row == row)


def test_goals_have_the_published_order_and_bounds(tmp_path: Path) -> None:
    raw = [entry(f"B{number}") for number in range(30)]
    goals = make_goals(opened(tmp_path, raw, {f"B{number}": ASKED for number in range(30)}), "synthetic", 233)

    # As AgentGym: one generator of seed 233 for the bounds in the order of products, another for
    # the order of goals.
    bounds = random.Random(233)
    expected = [(row, max(bounds.sample([10.0, 20.0, 30.0, 40.0], 2))) for row in range(30)]
    random.Random(233).shuffle(expected)
    assert [(each.row, each.price_bound) for each in goals] == expected


def test_human_goals_are_the_wishes_that_name_an_attribute(tmp_path: Path) -> None:
    wishes = [
        {"instruction": "i want a big mug.", "instruction_attributes": ["big"], "instruction_options": ["red", "xl"]},
        {"instruction": "any mug", "instruction_attributes": [], "instruction_options": []},
    ]
    (only,) = make_goals(opened(tmp_path, [entry("B01"), entry("B02")], {}, {"B02": wishes}), "human", 233)
    assert only.instruction.startswith("i want a big mug, and price lower than ")
    assert (only.row, only.attributes, only.options) == (1, ("big",), (("", "red"), ("", "xl")))


@pytest.mark.parametrize(
    ("tag", "bounds"), [("$975.00", {990.0}), ("$985.00", {1_000_000.0}), (None, {120.0, 130.0, 140.0})]
)
def test_bounds_of_dear_products_and_of_those_without_a_price(
    tmp_path: Path, tag: str | None, bounds: set[float]
) -> None:
    catalogue = opened(tmp_path, [entry("B01", pricing=tag)], {"B01": ASKED})
    price_bounds = {make_goals(catalogue, "synthetic", seed)[0].price_bound for seed in range(30)}
    assert price_bounds == bounds


def test_a_price_within_a_range_follows_from_seed_and_number(tmp_path: Path) -> None:
    product = opened(tmp_path, [entry("B01", pricing="$10.00 to $20.00")]).product(0)
    assert product_price(product, 1) == product_price(product, 1) != product_price(product, 2)
    assert all(10 <= product_price(product, seed) <= 20 for seed in range(50))


def test_a_catalogue_without_goals_of_a_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^environment\.options\.goals: the catalogue has no human instruction"):
        make_goals(opened(tmp_path, [entry("B01")]), "human", 233)


def test_published_split() -> None:
    split = split_goals([goal(number) for number in range(1600)], "webshop")
    assert split == {"test": tuple(range(500)), "dev": tuple(range(500, 1500)), "train": tuple(range(1500, 1600))}


def test_goals_that_read_alike_never_meet() -> None:
    goals = [goal(number) for number in range(1600)]
    goals[1550] = goals[1551] = goals[3]
    goals[700] = goals[499]
    split = split_goals(goals, "webshop")
    assert [len(split[name]) for name in ("test", "dev", "train")] == [500, 999, 98]
    texts = [{goals[index].instruction for index in indices} for indices in split.values()]
    assert sum(map(len, texts)) == len(set.union(*texts))


def test_split_by_product() -> None:
    goals = [goal(number, row=number % 50) for number in range(400)]
    split = split_goals(goals, "product")
    rows = {name: {goals[index].row for index in indices} for name, indices in split.items()}
    assert {name: len(members) for name, members in rows.items()} == {"test": 10, "dev": 5, "train": 35}
    assert sum(map(len, split.values())) == 400
    assert set.union(*rows.values()) == set(range(50))


@pytest.mark.parametrize(("count", "rule"), [(1500, "webshop"), (2, "product")])
def test_too_few_goals(count: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.options\.split: {count} goals are too few for .*'{rule}'"):
        split_goals([goal(number, row=number) for number in range(count)], rule)  # type: ignore[arg-type]


def write_lists(folder: Path, **names: object) -> Path:
    for name, value in names.items():
        folder.joinpath(f"webshop_{name}.json").write_text(json.dumps(value))
    return folder


def test_agentgyms_lists_are_splits(tmp_path: Path) -> None:
    folder = write_lists(
        tmp_path,
        train=[{"item_id": "webshop_7", "conversations": [{"from": "human"}]}, {"item_id": "webshop_3"}],
        test=[{"item_id": "webshop_5", "conversations": None}],
    )
    assert listed_goals([goal(number) for number in range(9)], folder) == {"test": (5,), "train": (7, 3)}


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ([{"item_id": "webshop_9"}], r"webshop_test\.json lists goal 9, but there are 9 goals"),
        ([{"item_id": "mug"}], r"webshop_test\.json is not a list of AgentGym items \(invalid literal"),
        ([{"item_id": 3}], r"webshop_test\.json is not a list of AgentGym items"),
    ],
)
def test_lists_that_do_not_fit(tmp_path: Path, test: object, told: str) -> None:
    with pytest.raises(DataFileError, match=told):
        listed_goals([goal(number) for number in range(9)], write_lists(tmp_path, train=[], test=test))


def test_missing_lists(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"set environment\.options\.ids_dir to the folder of webshop_train"):
        listed_goals([goal(1)], tmp_path)


def test_lists_reach_the_environment(tmp_path: Path) -> None:
    raw = [entry(f"B{number}", f"Mug {number}") for number in range(5)]
    wishes = {row["asin"]: {**ASKED, "instruction": f"Find me mug {row['asin']}"} for row in raw}
    folder = write(tmp_path, raw, wishes, suffix="_1000")
    write_lists(tmp_path, train=[{"item_id": "webshop_4"}], test=[{"item_id": "webshop_0"}, {"item_id": "webshop_1"}])
    env = WebShop(data_dir=str(folder), suffix="_1000", ids_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert [instance.key for instance in env.instances("test")] == ["webshop/test/0", "webshop/test/1"]
    assert env.splits() == ("test", "train")
