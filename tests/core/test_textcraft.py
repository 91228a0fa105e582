"""The rules of TextCraft, string by string, and its planner against the game itself."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from agentr_core.environments.crafting.game import CraftingProblem, Plan, craft_command, shortest_plan
from agentr_core.environments.crafting.recipes import RecipeBook
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.types import Instance, Verdict


@pytest.fixture
def env() -> TextCraft:
    return TextCraft()


def at(env: TextCraft, index: int, split: str | None = None) -> Instance:
    name = split or next(s for s in ("train", "test", "rest") if index in {i.index for i in env.instances(s)})
    return Instance(environment="textcraft", split=name, index=index)


def expert(env: TextCraft, instance: Instance) -> Sequence[str]:
    """Return the replies with which the expert wins an instance."""
    replies = env.expert(instance)
    assert replies is not None
    return replies


def shortest(problem: CraftingProblem, held: dict[str, int] | None = None) -> Plan:
    """Return the plan of a problem that can be solved."""
    plan = shortest_plan(problem, held or {})
    assert plan is not None
    return plan


def goal_index(env: TextCraft, item: str) -> int:
    return next(i for i, (goal, _) in enumerate(env.book.goals) if goal == f"minecraft:{item}")


def test_splits_are_the_published_ones(env: TextCraft) -> None:
    test = [i.index for i in env.instances("test")]
    assert test == [*range(31), *range(140, 181), *range(420, 445), 533, 534, 535]
    assert len(env.instances("train")) == 374
    assert not {i.index for i in env.instances("train")} & set(test)
    assert [env.depth(i) for i in env.instances("test")] == [1] * 31 + [2] * 41 + [3] * 25 + [4] * 3


def test_first_observation_lists_commands_and_goal(env: TextCraft) -> None:
    text = env.reset(at(env, goal_index(env, "stick")))
    assert text.startswith("Crafting commands:\ncraft ")
    assert text.endswith("\n\nGoal: craft stick.")
    assert "craft 4 stick using 2 planks" in text.splitlines()
    assert "craft 1 stick using 2 bamboo" not in text or "bamboo" in text


def test_text_of_an_instance_is_fixed(env: TextCraft) -> None:
    instance = at(env, 533)
    assert env.reset(instance) == TextCraft().reset(instance)


def test_a_whole_episode(env: TextCraft) -> None:
    env.reset(at(env, goal_index(env, "stick")))
    assert env.step("inventory").observation == "Inventory: You are not carrying anything."
    assert env.step("get 2 oak logs").observation == "Got 2 oak logs"
    assert env.step("craft 4 oak planks using 1 oak logs").observation == "Crafted 4 minecraft:oak_planks"
    assert env.step("inventory").observation == "Inventory: [oak logs] (1) [oak planks] (4) "
    last = env.step("craft 4 stick using 2 oak planks")
    assert last.observation == "Crafted 4 minecraft:stick"
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("get 1 stick", "Could not find stick"),
        ("get 1 planks", "Could not find planks"),
        ("get 1 unobtainium", "Could not find unobtainium"),
        ("get oak logs", "Could not execute get oak logs"),
        ("dance", "Could not execute dance"),
        ("", "Could not execute "),
        ("craft 4 stick using planks", "Wrong item format: planks"),
        ("craft 4 stick using 2 planks", "Could not find enough items to craft minecraft:stick"),
        ("craft 4 stick using 2 oak planks", "Could not find enough items to craft minecraft:stick"),
        ("get 0 oak logs", "Got 0 oak logs"),
    ],
)
def test_answers_to_what_fails(env: TextCraft, action: str, answer: str) -> None:
    env.reset(at(env, goal_index(env, "stick")))
    transition = env.step(action)
    assert transition.observation == answer
    assert (transition.reward, transition.terminated, transition.info["success"]) == (0.0, False, False)


def test_expert_episodes_win_in_the_form_of_agentgyms_demonstrations(env: TextCraft) -> None:
    for instance in env.instances("test")[::10]:
        env.reset(instance)
        for reply in expert(env, instance):
            last = env.step(env.parse(reply.replace("Thought: ", "Thought:\n").replace("\nAction: ", "\n\nAction:\n")))
        assert last.info["success"], instance.key


def test_multiples_are_refused_and_the_requested_number_is_ignored(env: TextCraft) -> None:
    env.reset(at(env, goal_index(env, "ladder")))
    env.step("get 4 oak logs")
    observation = env.step("craft 8 oak planks using 2 oak logs").observation
    assert observation == (
        "Could not find a valid recipe for "
        "ItemTagWithCount(item_tag=ItemTag(tag=None, item_id='minecraft:oak_planks'), count=8)"
    )
    assert env.step("craft 9 oak planks using 1 oak logs").observation == "Crafted 4 minecraft:oak_planks"
    assert env.step("craft oak planks using 1 oak logs").observation == "Crafted 4 minecraft:oak_planks"
    generic = env.step("craft 4 planks using 1 oak logs").observation
    assert generic == (
        "Could not find a valid recipe for "
        "ItemTagWithCount(item_tag=ItemTag(tag='minecraft:planks', item_id=None), count=4)"
    )


def test_strings_of_the_public_code(env: TextCraft) -> None:
    env.reset(at(env, goal_index(env, "stick")))
    answers = {
        "craft 1 planks using 1 oak logs": "Could not find enough items to craft None",
        "craft 4 oak planks using 0 oak logs": "Could not find enough items to craft minecraft:oak_planks",
        "get 0 oak logs": "Got 0 oak logs",
        "inventory": "Inventory: [oak logs] (0) ",
    }
    assert {action: env.step(action).observation for action in answers} == answers
    # None is enough once none is carried; then it is the recipe that is not there.
    observation = env.step("craft 4 oak planks using 0 oak logs").observation
    assert observation.startswith("Could not find a valid recipe for ItemTagWithCount(")
    assert env.inventory == {}
    snapshot = env.snapshot()
    env.step("get 2 oak logs")
    env.restore(snapshot)
    assert env.step("inventory").observation == "Inventory: [oak logs] (0) "


@pytest.mark.parametrize(
    "action",
    [
        "get {} oak logs",
        "craft {} stick using 2 planks",
        "craft 4 stick using {} oak planks",
    ],
)
def test_a_number_that_is_too_long_is_answered(env: TextCraft, action: str) -> None:
    env.reset(at(env, goal_index(env, "stick")))
    for digits in (4001, 5000, 100_000):
        command = action.format("9" * digits)
        assert env.step(command)[:3] == (f"Could not execute {command}", 0.0, False)
    for _ in range(3):
        assert env.step(f"get {'9' * 4000} oak logs").observation.startswith("Got 9")
    assert env.step("inventory").observation.startswith("Inventory: [oak logs] (2")


@pytest.mark.parametrize(
    ("distractors", "problems"),
    [
        ("distinct", {6: 7, 7: 13, 8: 21, 9: 55, 10: 329}),
        ("published", {6: 47, 7: 29, 8: 12, 9: 14, 10: 323}),
    ],
)
def test_instances_have_as_many_distractors_as_the_pool_gives(
    distractors: Literal["distinct", "published"], problems: dict[int, int]
) -> None:
    env = TextCraft(distractors=distractors)
    counts: Counter[int] = Counter()
    for split in ("train", "test", "rest"):
        for instance in env.instances(split):
            problem = env.problem(instance)
            goal_commands = set(below(env.book, problem.goal))
            counts[len({craft_command(recipe) for recipe in problem.commands} - goal_commands)] += 1
    assert {count: counts[count] for count in range(6, 11)} == problems
    assert counts.total() == 544


def below(book: RecipeBook, name: str) -> Iterator[str]:
    for recipe in book.recipes_by_item.get(name) or book.recipes_by_tag.get(name, ()):
        yield craft_command(recipe)
        for ingredient in recipe.inputs:
            yield from below(book, ingredient.name)


def test_the_published_pool_keeps_the_contract_and_leaves_other_splits_alone() -> None:
    plain, published_env = TextCraft(), TextCraft(distractors="published")
    for split in ("procedural", "shaped"):
        instance = plain.instances(split)[7]
        assert published_env.reset(instance) == plain.reset(instance)
    assert published_env.reset(at(plain, 420)) == TextCraft(distractors="published").reset(at(plain, 420))
    instance = published_env.instances("test")[40]
    published_env.reset(instance)
    for reply in expert(published_env, instance):
        last = published_env.step(published_env.parse(reply))
    assert last.info["success"]


def test_goal_that_can_be_got_is_rewarded(env: TextCraft) -> None:
    env.reset(at(env, goal_index(env, "stick")))
    env._goal = "minecraft:oak_logs"
    assert env.step("get 1 oak logs").reward == 1.0


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought: x\nAction: get 1 oak logs", "get 1 oak logs"),
        ("Action:get 2  Oak-Logs!", "get 2 oaklogs"),
        ("Action: get 1 a\nAction: get 2 b", "get 2 b"),
        ("get 1 oak logs", ""),
        ("Thought: no label", ""),
    ],
)
def test_parser(env: TextCraft, reply: str, action: str) -> None:
    assert env.parse(reply) == action


@pytest.mark.slow
@pytest.mark.parametrize("style", ["optimal", "lazy"])
def test_expert_solves_every_official_goal(style: Literal["optimal", "lazy"]) -> None:
    env = TextCraft(expert=style)
    for split in ("train", "test", "rest"):
        for instance in env.instances(split):
            env.reset(instance)
            for reply in expert(env, instance):
                last = env.step(env.parse(reply))
            assert last.info["success"], instance.key


@pytest.mark.slow
def test_optimal_expert_is_never_longer_than_the_lazy_one_and_as_long_as_its_plan() -> None:
    optimal, lazy = TextCraft(expert="optimal"), TextCraft(expert="lazy")
    for instance in [*optimal.instances("test"), *optimal.instances("procedural")[:200]]:
        steps = len(expert(optimal, instance))
        assert steps <= len(expert(lazy, instance))
        assert steps == shortest(optimal.problem(instance)).num_steps


def test_plan_takes_what_is_at_hand_into_account(env: TextCraft) -> None:
    problem = env.problem(at(env, goal_index(env, "stick")))
    assert shortest(problem).num_steps == min(shortest(problem).num_steps, 3)
    assert shortest(problem, {"minecraft:birch_planks": 2}).num_steps == 1
    assert shortest(problem, {"minecraft:birch_planks": 2}).item_by_tag["minecraft:planks"] == "minecraft:birch_planks"


def test_plan_of_a_goal_that_needs_itself_is_none(env: TextCraft) -> None:
    problem = env.problem(at(env, goal_index(env, "stick")))
    recipe = problem.commands[0]
    circle = CraftingProblem(
        goal=recipe.output,
        commands=(
            type(recipe)(
                output=recipe.output,
                count=1,
                output_tag=None,
                inputs=(type(recipe.inputs[0])(name=recipe.output, count=1, is_tag=False),),
            ),
        ),
        item_to_tag={},
    )
    assert shortest_plan(circle, {}) is None


def test_procedural_worlds_share_no_item_with_the_official_ones_and_have_their_depth(env: TextCraft) -> None:
    for instance in env.instances("procedural")[:100]:
        problem = env.problem(instance)
        items = {recipe.output for recipe in problem.commands} | {i.name for r in problem.commands for i in r.inputs}
        assert not items & env.book.items
        assert env.depth(instance) == instance.index % 4 + 1


@pytest.mark.slow
def test_renamed_instances_are_training_instances_under_other_names() -> None:
    env = TextCraft(expert="lazy")
    train, variants = env.instances("train"), env.instances("renamed")
    for number in range(0, 400, 9):
        origin, first, second = train[number % len(train)], variants[number], variants[number + len(train)]
        assert env.depth(first) == env.depth(origin)
        problems = [env.problem(instance) for instance in (origin, first, second)]
        shapes = [sorted((r.count, tuple(i.count for i in r.inputs)) for r in problem.commands) for problem in problems]
        assert shapes[0] == shapes[1] == shapes[2]
        assert len({frozenset(problem.commands) for problem in problems}) == 3
        env.reset(first)
        for reply in expert(env, first):
            last = env.step(env.parse(reply))
        assert last.info["success"], first.key
        assert set(env.oracle(first, [env.parse(reply) for reply in expert(env, first)])) == {Verdict.GOOD}


@pytest.mark.parametrize(("split", "of"), [("renamed-test", "test"), ("renamed-rest", "rest")])
def test_held_out_instances_come_under_other_names_too(split: str, of: str) -> None:
    env = TextCraft(expert="lazy")
    official, variants = env.instances(of), env.instances(split)
    for number in range(0, 3 * len(official), 7):
        origin = official[number % len(official)]
        assert env.origin(variants[number]) == origin == env.origin(origin)
        assert env.depth(variants[number]) == env.depth(origin)
        assert shortest(env.problem(variants[number])).num_steps == shortest(env.problem(origin)).num_steps
        assert env.reset(variants[number]) != env.reset(origin)
    # Numbers of several splits are not drawn alike.
    assert env.reset(env.instances("renamed")[0]) != env.reset(variants[0])


def test_the_state_is_what_is_carried(env: TextCraft) -> None:
    env.reset(at(env, 144))
    states = [env.state()]
    for action in ("get 1 nothing", "inventory", "get 1 spruce logs", "get 1 spruce logs"):
        env.step(action)
        states.append(env.state())
    assert states[0] == states[1] == states[2]
    assert len({*states}) == 3


def test_misuse_is_told_in_one_sentence(env: TextCraft) -> None:
    with pytest.raises(ConfigError, match="no split 'validation'"):
        env.instances("validation")
    with pytest.raises(EnvironmentFault, match="textcraft/test/9999"):
        env.reset(Instance(environment="textcraft", split="test", index=9999))
    with pytest.raises(ConfigError, match="optimal or lazy"):
        TextCraft(expert="clever")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="distractors must be distinct or published, not 'many'"):
        TextCraft(distractors="many")  # type: ignore[arg-type]


def test_every_string_of_the_expert_is_a_listed_command(env: TextCraft) -> None:
    instance = at(env, 144)
    commands = {craft_command(recipe) for recipe in env.problem(instance).commands}
    crafts = [env.parse(r) for r in expert(env, instance) if "Action: craft" in r]
    assert all(c in commands or "planks" in c for c in crafts)
