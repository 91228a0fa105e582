"""The oracle of a crafting world: each kind of step on one small problem, and experts of the real
ones.
"""

from __future__ import annotations

import pytest

from agentr_core.environment import Environment
from agentr_core.environments.crafting.game import CraftingProblem, verdicts
from agentr_core.environments.crafting.recipes import Ingredient, Recipe, build_book
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.types import Verdict

GOOD, BAD, UNCERTAIN = Verdict.GOOD, Verdict.BAD, Verdict.UNCERTAIN


def recipe(count: int, output: str, *inputs: tuple[int, str]) -> Recipe:
    return Recipe(
        output=f"minecraft:{output}",
        count=count,
        output_tag=None,
        inputs=tuple(Ingredient(name=f"minecraft:{name}", count=number, is_tag=False) for number, name in inputs),
    )


# A chair takes two boards (one log gives two) and three nails; a toy wastes boards.
COMMANDS = (
    recipe(1, "chair", (2, "board"), (3, "nail")),
    recipe(2, "board", (1, "log")),
    recipe(1, "toy", (2, "board")),
    recipe(1, "rope", (1, "grass")),
)
PROBLEM = CraftingProblem(goal="minecraft:chair", commands=COMMANDS, item_to_tag={})
WORLD = build_book(COMMANDS)
TO_THE_BOARDS = ("get 1 log", "craft 2 board using 1 log")


def judge(*actions: str) -> list[Verdict]:
    return list(verdicts(PROBLEM, WORLD, actions))


def test_the_way_to_the_goal_is_good_in_any_useful_order() -> None:
    last = "craft 1 chair using 2 board, 3 nail"
    assert judge(*TO_THE_BOARDS, "get 3 nail", last) == [GOOD] * 4
    assert judge("get 3 nail", *TO_THE_BOARDS, last) == [GOOD] * 4


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        ("get 3 nail", GOOD),
        ("get 9 nail", GOOD),
        ("get 2 nail", UNCERTAIN),
        ("inventory", UNCERTAIN),
        ("get 1 grass", BAD),
        ("get 1 board", BAD),
        ("craft 1 chair using 2 board, 3 nail", BAD),
        ("craft 2 chair", BAD),
        ("dance", BAD),
        ("", BAD),
    ],
)
def test_a_first_step(action: str, verdict: Verdict) -> None:
    assert judge(action) == [verdict]


def test_doing_it_again_or_wasting_it_is_bad() -> None:
    assert judge("get 1 log", "get 1 log") == [GOOD, BAD]
    assert judge(*TO_THE_BOARDS, "craft 1 toy using 2 board") == [GOOD, GOOD, BAD]
    assert judge("get 2 nail", "get 1 nail") == [UNCERTAIN, GOOD]


def test_a_longer_way_is_uncertain_and_pays_off() -> None:
    commands = (recipe(1, "lamp", (2, "oil")), recipe(1, "lamp", (1, "wick")), recipe(1, "wick", (1, "wool")))
    problem = CraftingProblem(goal="minecraft:lamp", commands=commands, item_to_tag={})
    world = build_book(commands)
    shortest = ["get 2 oil", "craft 1 lamp using 2 oil"]
    longer = ["get 1 wool", "craft 1 wick using 1 wool", "craft 1 lamp using 1 wick"]
    assert verdicts(problem, world, shortest) == (GOOD, GOOD)
    assert verdicts(problem, world, longer) == (UNCERTAIN, GOOD, GOOD)
    assert verdicts(problem, world, ["get 1 wool", "get 1 wool"]) == (UNCERTAIN, BAD)


def test_a_mistake_does_not_spoil_what_follows() -> None:
    assert judge("dance", *TO_THE_BOARDS) == [BAD, GOOD, GOOD]
    actions = (*TO_THE_BOARDS, "craft 1 toy using 2 board")
    assert judge(*actions, *TO_THE_BOARDS)[3:] == [GOOD, GOOD]


def test_nothing_is_clear_where_the_goal_is_out_of_reach() -> None:
    commands = (recipe(1, "egg", (1, "hen")), recipe(1, "hen", (1, "egg")))
    problem = CraftingProblem(goal="minecraft:egg", commands=commands, item_to_tag={})
    assert verdicts(problem, build_book(commands), ["inventory", "get 1 egg"]) == (UNCERTAIN, UNCERTAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "allowed"),
    # Where a kind of item is asked for, the optimal expert may choose one that takes a step more.
    [("lazy", {GOOD}), ("optimal", {GOOD, UNCERTAIN})],
)
def test_the_environment_is_an_oracle_and_finds_its_experts_good(style: str, allowed: set[Verdict]) -> None:
    env = TextCraft(expert=style)  # type: ignore[arg-type]
    assert env.has(Environment.oracle)
    splits = ("test", "train", "rest", "procedural", "renamed")
    for instance in [instance for split in splits for instance in env.instances(split)[:60:2]]:
        replies = env.expert(instance)
        assert replies is not None
        actions = [env.parse(reply) for reply in replies]
        assert set(env.oracle(instance, actions)) <= allowed, instance.key


def test_asking_the_oracle_leaves_the_episode_alone() -> None:
    env = TextCraft()
    first, second = env.instances("train")[:2]
    env.reset(first)
    env.step("inventory")
    before = env.snapshot()
    env.oracle(second, ["get 1 oak logs"])
    assert env.snapshot() == before
    assert env.oracle(first, []) == ()
