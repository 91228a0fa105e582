"""Dives that begin after the expert's first steps, where a tree has earned nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from toy import Growing, Line, Policy, Script, instance

from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow, num_expert_steps
from agentr_core.search.tree import steps_to
from agentr_core.types import Instance, Tree

LED = SearchConfig(dives=6, width=2, depth=6, give_up=2, expert_start=True)
LOOK, RIGHT = ["look"], ["right"]


def expert_steps(tree: Tree) -> dict[int, tuple[int, int]]:
    """The depth and the dive of each node of a step that no model drew."""
    return {node.index: (node.depth, node.dive) for node in tree.nodes[1:] if node.duplicates == 0}


@pytest.mark.parametrize(
    ("steps", "dives_done", "give_up", "shown"),
    [(8, 2, 2, 4), (8, 3, 2, 4), (8, 4, 2, 6), (8, 6, 2, 7), (8, 60, 2, 7), (5, 1, 2, 3), (2, 1, 1, 1), (1, 1, 1, 0)],
)
def test_half_of_what_is_left_is_shown_and_never_the_last_step(
    steps: int, dives_done: int, give_up: int, shown: int
) -> None:
    assert num_expert_steps(steps, dives_done=dives_done, dives_per_halving=give_up) == shown


async def test_dives_begin_later_and_later_until_one_is_rewarded() -> None:
    # Six steps to the right; the policy looks around, and goes right only where five are behind it.
    model = Script(*[LOOK] * 5, RIGHT)
    log = Growing()
    tree = await grow(instance(4), Line(), model, LED, seed=1, on_expansion=log)
    assert log.tree(tree) == tree
    assert sorted(expert_steps(tree).values()) == [(1, 1), (2, 1), (3, 1), (4, 3), (5, 3)]
    goal_nodes = [node for node in tree.nodes if node.step is not None and node.step.success]
    assert goal_nodes
    assert {node.dive for node in goal_nodes} == {4}
    assert [step.action for step in steps_to(tree.nodes, goal_nodes[0].index)] == ["right"] * 6
    assert all(step.finish_reason is None for step in steps_to(tree.nodes, goal_nodes[0].index)[:5])


async def test_without_the_setting_the_tree_is_given_up() -> None:
    config = SearchConfig(dives=6, width=2, depth=9, give_up=2)
    tree = await grow(instance(4), Line(), Script(LOOK), config, seed=1)
    assert tree.dives_done == 2
    assert not expert_steps(tree)


async def test_steps_that_the_policy_took_itself_are_not_added_again() -> None:
    config = SearchConfig(dives=6, width=2, depth=9, give_up=2, expert_start=True, merge="action")
    tree = await grow(instance(4), Line(), Script(RIGHT, LOOK), config, seed=1)
    assert [depth for depth, _ in expert_steps(tree).values()] == [2, 3, 4, 5]
    for node in tree.nodes:
        actions = [child.step.action for child in tree.nodes if child.parent == node.index and child.step]
        assert len(actions) == len(set(actions))


async def test_a_tree_that_ended_everywhere_is_opened_again() -> None:
    log = Growing()
    tree = await grow(instance(4), Line(), Script(["jump"]), LED, seed=1, on_expansion=log)
    assert log.tree(tree) == tree
    assert sorted(expert_steps(tree).values()) == [(1, 0), (2, 0), (3, 0), (4, 3), (5, 3)]
    assert tree.nodes[0].terminal
    assert tree.dives_done == 6
    assert not tree.nodes[0].value_sum


async def test_the_expert_may_lead_nowhere() -> None:
    class Ignorant(Line):
        def expert(self, instance: Instance) -> Sequence[str] | None:
            return None

    class Wrong(Line):
        def expert(self, instance: Instance) -> Sequence[str] | None:
            return ["Action: jump"] * 4

    class Short(Line):
        def expert(self, instance: Instance) -> Sequence[str] | None:
            return ["Action: right"]

    for world in (Ignorant(), Wrong(), Short()):
        tree = await grow(instance(4), world, Script(LOOK), LED, seed=1)
        assert tree.dives_done == 2
        assert not expert_steps(tree)


async def test_the_way_stays_within_the_depth_of_the_search() -> None:
    config = SearchConfig(dives=6, width=2, depth=2, give_up=1, expert_start=True)
    tree = await grow(instance(4), Line(), Script(LOOK), config, seed=1)
    assert max(depth for depth, _ in expert_steps(tree).values()) == 2
    assert max(node.depth for node in tree.nodes) == 3


@pytest.mark.parametrize("can_snapshot", [True, False])
async def test_a_path_without_room_is_not_led_on(can_snapshot: bool) -> None:
    model = Policy(["look"], max_messages=1)
    tree = await grow(instance(4), Line(can_snapshot=can_snapshot), model, LED, seed=1)
    assert len(tree.nodes) == 1
