"""What holds of every invented crafting world and of every action in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentr_core.environments.crafting.game import CraftingProblem, shortest_plan
from agentr_core.environments.crafting.textcraft import ProceduralWorlds, TextCraft
from agentr_core.types import Instance, Verdict

INDICES = st.integers(0, 10**9 - 1)
OPTIMAL, LAZY = TextCraft(expert="optimal"), TextCraft(expert="lazy")


def instance_at(index: int) -> Instance:
    return Instance(environment="textcraft", split="procedural", index=index)


@given(index=INDICES, seed=st.integers(0, 2**63 - 1), max_depth=st.integers(1, 6))
def test_a_world_has_its_depth_and_a_goal_within_reach(index: int, seed: int, max_depth: int) -> None:
    worlds = ProceduralWorlds(seed=seed, max_depth=max_depth)
    world, goal = worlds.world(index)
    assert world.depth(goal) == index % max_depth + 1
    plan = shortest_plan(CraftingProblem(goal=goal, commands=world.recipes, item_to_tag=world.item_to_tag), {})
    assert plan is not None
    assert plan.get_counts
    assert all(item not in world.recipes_by_item for item in plan.get_counts), "what can be crafted cannot be got"
    assert ProceduralWorlds(seed=seed, max_depth=max_depth).world(index) == (world, goal)


@given(index=INDICES)
def test_no_item_is_an_official_one(index: int) -> None:
    world, _ = ProceduralWorlds().world(index)
    assert not world.items & OPTIMAL.book.items


@given(index=INDICES)
def test_both_experts_win_and_the_optimal_one_is_not_slower(index: int) -> None:
    lengths = []
    for env in (OPTIMAL, LAZY):
        replies = env.expert(instance_at(index))
        assert replies is not None
        env.reset(instance_at(index))
        results = [env.step(env.parse(reply)) for reply in replies]
        assert [result.terminated for result in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].reward == 1.0
        assert all(result.info["valid"] for result in results)
        lengths.append(len(replies))
    assert lengths[0] <= lengths[1]
    assert lengths[0] == steps_left(OPTIMAL, index, {})


@given(index=INDICES, data=st.data())
def test_the_oracle_says_good_where_fewer_steps_are_left_and_never_to_a_refusal(
    index: int, data: st.DataObject
) -> None:
    replies = OPTIMAL.expert(instance_at(index))
    assert replies is not None
    expert_actions = [OPTIMAL.parse(reply) for reply in replies]
    actions = data.draw(st.lists(st.sampled_from([*expert_actions, "inventory", "get 1 nothing", "dance"]), max_size=8))
    words = LAZY.oracle(instance_at(index), actions)
    assert len(words) == len(actions)
    OPTIMAL.reset(instance_at(index))
    for action, word in zip(actions, words, strict=True):
        before = steps_left(OPTIMAL, index, OPTIMAL.inventory)
        observation = OPTIMAL.step(action).observation
        if steps_left(OPTIMAL, index, OPTIMAL.inventory) < before:
            assert word is Verdict.GOOD
        if observation.startswith("Could not"):
            assert word is Verdict.BAD
        if action == "inventory":
            assert word is Verdict.UNCERTAIN


def steps_left(env: TextCraft, index: int, inventory: object) -> int:
    plan = shortest_plan(env.problem(instance_at(index)), inventory)  # type: ignore[arg-type]
    assert plan is not None
    return plan.num_steps
