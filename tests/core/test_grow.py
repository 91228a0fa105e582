"""The search on a toy world: shape of a dive, endings, duplicates, restoring states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from toy import Growing, Line, Policy, Script, instance

from agentr_core.episodes.rollout import EpisodeTimer
from agentr_core.errors import DataFault, ReplayDiverged
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths
from agentr_core.types import Generation, Node, Request, Sampling, StopReason, Tree, TreePath


def node_with(tree: Tree, action: str) -> Node:
    return next(node for node in tree.nodes if node.step and node.step.action == action)


async def test_one_dive_goes_down_until_everything_at_its_frontier_has_ended() -> None:
    # At the root "stop" ends and "right" goes on; below, "right" wins and "stop" ends.
    model = Script(["stop", "right"], ["right", "stop"])
    tree = await grow(instance(), Line(), model, SearchConfig(dives=1, width=2), seed=1)
    assert [(n.parent, n.depth, n.step.action if n.step else "") for n in tree.nodes] == [
        (-1, 0, ""),
        (0, 1, "stop"),
        (0, 1, "right"),
        (2, 2, "right"),
        (2, 2, "stop"),
    ]
    assert [(n.visits, n.value_sum) for n in tree.nodes] == [(3, 1.5), (1, 0.0), (2, 1.5), (1, 1.0), (1, 0.5)]
    assert all(n.terminal for n in tree.nodes)
    assert tree.dives_done == 1
    assert tree.nodes[3].stop is StopReason.SUCCESS
    assert tree.nodes[4].stop is StopReason.FAILURE
    assert tree.nodes[2].stop is None
    assert [len(r.messages) for r in model.requests] == [3, 5]


async def test_the_prompt_is_what_was_sampled_and_observed() -> None:
    model = Script(["right"], ["stop"])
    await grow(instance(), Line(), model, SearchConfig(dives=1, width=1, temperature=0.7), seed=1)
    messages = model.requests[1].messages
    assert [m.role for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[0].text == Line.instruction
    assert messages[2].text == "The goal is 2 to the right."
    assert messages[3].text == "Thought: 0\nAction: right"
    assert messages[3].token_ids == tuple(map(ord, messages[3].text))
    assert messages[4].text == "You are at 1."
    assert not any(m.train for m in messages)
    assert model.requests[1].sampling == Sampling(temperature=0.7)
    assert len({r.session for r in model.requests}) == 1


async def test_search_stops_early_when_the_tree_is_exhausted() -> None:
    model = Script(["stop"])
    tree = await grow(instance(), Line(), model, SearchConfig(dives=8, width=1), seed=1)
    assert len(model.requests) == 1
    assert tree.nodes[0].terminal
    assert tree.dives_done == 1


@pytest.mark.parametrize(("second", "dives"), [("look", 2), ("stop", 5)])
async def test_a_tree_without_a_reward_is_given_up(second: str, dives: int) -> None:
    # "stop" one step to the right of the start brings half of the reward, "look" none.
    model = Script(["right", "look"], ["left", second], ["look"])
    config = SearchConfig(dives=5, width=2, depth=6, give_up=2)
    tree = await grow(instance(), Line(), model, config, seed=1)
    assert tree.dives_done == dives


async def test_a_disaster_ends_with_reward_zero() -> None:
    tree = await grow(instance(), Line(), Script(["jump"]), SearchConfig(dives=1, width=1), seed=1)
    leaf = tree.nodes[1]
    assert leaf.step is not None
    assert leaf.step.disaster
    assert not leaf.step.success
    assert (leaf.step.reward, leaf.terminal, leaf.stop) == (0.0, True, StopReason.DISASTER)
    assert (tree.nodes[0].visits, tree.nodes[0].value_sum) == (1, 0.0)


async def test_horizon_leaves_lie_one_below_the_depth_limit() -> None:
    tree = await grow(instance(), Line(), Script(["look"]), SearchConfig(dives=1, width=2, depth=3), seed=1)
    ends = [n for n in tree.nodes if n.stop]
    assert {(n.depth, n.stop) for n in ends} == {(4, StopReason.STEP_LIMIT)}
    assert max(n.depth for n in tree.nodes) == 4


async def test_a_full_context_ends_the_path_and_costs_the_dive() -> None:
    model = Policy(["look"], thoughts=1000, max_messages=5)
    log = Growing()
    tree = await grow(instance(), Line(), model, SearchConfig(dives=2, width=2), seed=1, on_expansion=log)
    ends = [n for n in tree.nodes if n.stop]
    assert {(n.depth, n.stop) for n in ends} == {(2, StopReason.CONTEXT_LIMIT)}
    assert len(ends) == tree.nodes[0].visits == 2
    assert tree.dives_done == 2
    assert log.tree(tree) == tree
    assert [p.trajectory.stop for p in leaf_paths(tree, "t")] == [StopReason.CONTEXT_LIMIT] * 2


async def test_an_instruction_that_fills_the_context_gives_a_bare_tree() -> None:
    tree = await grow(instance(), Line(), Policy(max_messages=2), SearchConfig(), seed=1)
    assert (len(tree.nodes), tree.nodes[0].terminal, tree.nodes[0].stop) == (1, True, StopReason.CONTEXT_LIMIT)
    assert leaf_paths(tree, "t") == ()


@pytest.mark.parametrize(("merge", "children"), [("reply", [3, 1]), ("action", [4])])
async def test_equal_siblings_become_one(merge: str, children: list[int]) -> None:
    class Same(Script):
        def reply(self, request, number):  # type: ignore[no-untyped-def]
            return f"Thought: {number == 2}\nAction: stop"

    log = Growing()
    env = Line()
    config = SearchConfig(dives=1, width=4, merge=merge)  # type: ignore[arg-type]
    tree = await grow(instance(), env, Same(), config, seed=1, on_expansion=log)
    assert [n.duplicates for n in tree.nodes[1:]] == children
    assert env.steps == len(children)
    draws = log.expansions[0].draws
    assert [(d.number, d.parent) for d in draws] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [d.node for d in draws] == ([1, 1, 2, 1] if merge == "reply" else [1, 1, 1, 1])


async def test_a_reply_cut_within_its_thought_is_no_sibling_of_the_action_it_considers() -> None:
    class Thinking(Script):
        async def __call__(self, request: Request) -> list[Generation]:
            cut, *others = await super().__call__(request)
            return [replace(cut, finish_reason="length", unfinished_thought=True), *others]

    config = SearchConfig(dives=1, width=3, depth=1, merge="action")
    tree = await grow(instance(), Line(), Thinking(["stop"]), config, seed=1)
    children = [node for node in tree.nodes if node.depth == 1]
    assert [(node.step.action if node.step else "", node.duplicates) for node in children] == [("", 1), ("stop", 2)]


async def test_snapshots_and_replay_lead_to_the_same_tree() -> None:
    config = SearchConfig(dives=6, width=3, depth=6)
    copying, replaying = Line(), Line(can_snapshot=False)
    timer = EpisodeTimer()
    tree = await grow(instance(3), copying, Policy(), config, seed=5, timer=timer)
    replay_tree = await grow(instance(3), replaying, Policy(), config, seed=5)
    blocking = await grow(instance(3), Line(blocking=True), Policy(), config, seed=5)
    assert tree == replay_tree == blocking
    assert copying.resets == 1
    assert copying.steps == len(tree.nodes) - 1
    assert replaying.steps > copying.steps
    assert timer.environment_seconds > 0


async def test_a_drifting_environment_is_found_out() -> None:
    env = Line(can_snapshot=False, drift=True)
    with pytest.raises(ReplayDiverged, match=r"line/train/0: observation 0 after 'look' was recorded as .* is now"):
        await grow(instance(), env, Script(["look"]), SearchConfig(dives=1, width=2), seed=1)


async def test_trees_differ_by_seed() -> None:
    trees = [await grow(instance(2), Line(), Policy(), SearchConfig(dives=2), seed=seed) for seed in (1, 1, 2)]
    assert trees[0] == trees[1]
    assert trees[0].nodes != trees[2].nodes


async def test_a_spent_subtree_costs_its_dive_without_a_reply() -> None:
    tree = await grow(instance(), Line(), Script(["stop"]), SearchConfig(dives=1, width=1), seed=1)
    # A root that was not marked as exhausted: each dive into it finds nothing.
    root = Node(index=0, parent=-1, depth=0, step=None, visits=1)
    stale = Tree(
        instance=tree.instance,
        first_observation=tree.first_observation,
        nodes=(root, tree.nodes[1]),
        dives_done=1,
        seed=1,
    )
    model = Script(["stop"])
    new_tree = await grow(instance(), Line(), model, SearchConfig(dives=3, width=1), seed=1, tree=stale)
    assert (new_tree.dives_done, model.requests) == (3, [])


async def test_a_tree_of_another_seed_or_with_a_gap_is_refused() -> None:
    tree = await grow(instance(), Line(), Policy(), SearchConfig(dives=1), seed=1)
    with pytest.raises(DataFault, match="cannot grow on"):
        await grow(instance(), Line(), Policy(), SearchConfig(), seed=2, tree=tree)
    gap = Tree(
        instance=tree.instance,
        first_observation=tree.first_observation,
        nodes=(tree.nodes[0], *tree.nodes[2:]),
        dives_done=1,
        seed=1,
    )
    with pytest.raises(DataFault, match="load all nodes"):
        await grow(instance(), Line(), Policy(), SearchConfig(), seed=1, tree=gap)


def replies(path: TreePath) -> list[str]:
    return [step.reply for step in path.trajectory.steps]


def common(one: Sequence[object], other: Sequence[object]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


async def test_paths_share_the_same_prefix_by_node_and_by_reply() -> None:
    tree = await grow(instance(2), Line(), Policy(), SearchConfig(dives=4), seed=3)
    paths = leaf_paths(tree, "t")
    assert len(paths) == tree.nodes[0].visits > 3
    pairs = [(a, b) for a in paths for b in paths if a is not b]
    lengths = [(common(a.nodes, b.nodes), common(replies(a), replies(b))) for a, b in pairs]
    assert all(by_node == by_reply for by_node, by_reply in lengths)
    assert {by_node for by_node, _ in lengths} > {0, 1}
    for path in paths:
        assert path.trajectory.reward == tree.nodes[path.leaf].value
        assert len(path.trajectory.steps) == len(path.nodes) == tree.nodes[path.leaf].depth


async def test_rollouts_are_chains_below_the_root() -> None:
    log = Growing()
    config = SearchConfig(method="rollouts", dives=3, width=2, depth=4)
    tree = await grow(instance(2), Line(), Policy(), config, seed=3, on_expansion=log)
    paths = leaf_paths(tree, "t")
    assert len(paths) == 6 == tree.nodes[0].visits
    assert [n.dive for n in tree.nodes if n.depth == 1] == [0, 0, 1, 1, 2, 2]
    assert tree.dives_done == 3
    assert tree.nodes[0].terminal
    assert max(len(p.nodes) for p in paths) <= 5
    assert sum(len(p.nodes) for p in paths) == len(tree.nodes) - 1
    pairs = [(a, b) for a in paths for b in paths if a is not b]
    assert not any(common(a.nodes, b.nodes) for a, b in pairs)
    assert any(common(replies(a), replies(b)) for a, b in pairs), "independent episodes may begin alike"
    assert log.tree(tree) == tree
    assert len(log.expansions) == 6
