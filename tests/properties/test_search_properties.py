"""What holds of every tree, whatever the policy and the settings."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from toy import ACTIONS, Growing, Line, Policy, instance

from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths
from agentr_core.types import Tree


@st.composite
def grown(draw: st.DrawFn) -> tuple[Tree, SearchConfig, Growing]:
    config = SearchConfig(
        method=draw(st.sampled_from(["mcts", "mcts", "rollouts"])),
        dives=draw(st.integers(1, 6)),
        width=draw(st.integers(1, 4)),
        depth=draw(st.integers(1, 6)),
        exploration=draw(st.floats(0, 3)),
        merge=draw(st.sampled_from(["reply", "action"])),
    )
    actions = draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=6))
    policy = Policy(actions, thoughts=draw(st.integers(1, 5)), max_messages=draw(st.integers(2, 20)))
    log = Growing()
    env = Line(can_snapshot=draw(st.booleans()))
    chosen = instance(draw(st.integers(0, 4)))
    tree = asyncio.run(grow(chosen, env, policy, config, seed=draw(st.integers(0, 2**40)), on_expansion=log))
    return tree, config, log


@given(grown())
def test_statistics_count_the_ends_of_paths(case: tuple[Tree, SearchConfig, Growing]) -> None:
    tree, config, _ = case
    children = {n.index: [c for c in tree.nodes if c.parent == n.index] for n in tree.nodes}
    ends = [n for n in tree.nodes if n.stop is not None]
    assert tree.nodes[0].visits == len(ends)
    assert len(leaf_paths(tree, "t")) == len([n for n in ends if n.step])
    for node in tree.nodes:
        assert 0 <= node.value <= 1
        below = children[node.index]
        if node.stop is not None:
            assert not below
            assert node.terminal
            assert node.visits == 1
        else:
            assert node.visits == sum(c.visits for c in below)
            assert abs(node.value_sum - sum(c.value_sum for c in below)) < 1e-9
        if config.method == "mcts" and node.stop is None:
            assert node.terminal == (bool(below) and all(c.terminal for c in below))
        assert node.depth <= config.depth + 1
        assert node.parent < node.index


@given(grown())
def test_a_search_ends_for_a_reason_and_siblings_differ(case: tuple[Tree, SearchConfig, Growing]) -> None:
    tree, config, _ = case
    assert tree.dives_done == config.dives or tree.nodes[0].terminal
    assert tree.dives_done <= config.dives
    if config.method == "mcts":
        for node in tree.nodes:
            below = [c.step for c in tree.nodes if c.parent == node.index and c.step]
            keys = [s.reply if config.merge == "reply" else s.action for s in below]
            assert len(set(keys)) == len(keys)
            if below:
                assert sum(c.duplicates for c in tree.nodes if c.parent == node.index) == config.width


@given(grown())
def test_the_reported_expansions_make_up_the_tree(case: tuple[Tree, SearchConfig, Growing]) -> None:
    tree, _, log = case
    assert log.tree(tree) == tree
    replies = {d.node: d.generation.text for e in reversed(log.expansions) for d in reversed(e.draws)}
    assert replies == {n.index: n.step.reply for n in tree.nodes if n.step}
