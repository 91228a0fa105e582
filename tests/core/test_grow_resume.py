"""A search that is cut off after any expansion grows on to the tree it would have become."""

from __future__ import annotations

import pytest
from toy import Cut, Growing, Line, Policy, instance

from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow


@pytest.mark.slow
@pytest.mark.parametrize("can_snapshot", [True, False])
@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (SearchConfig(dives=6, width=3, depth=5), Policy()),
        (SearchConfig(dives=8, width=3, depth=5, merge="action"), Policy(("right", "left", "look", "stop"))),
        (SearchConfig(dives=5, width=3, depth=9), Policy(("look", "left", "right"), max_messages=9)),
        (SearchConfig(dives=6, width=3, depth=9, give_up=2), Policy(("look", "left", "right"))),
        (SearchConfig(dives=8, width=2, depth=9, give_up=2, expert_start=True), Policy(("look", "left"))),
        (SearchConfig(dives=9, width=2, depth=9, give_up=1, expert_start=True), Policy(("look", "right", "jump"))),
        (SearchConfig(method="rollouts", dives=3, width=2, depth=5), Policy()),
    ],
)
async def test_every_cut_resumes_to_the_same_tree(can_snapshot: bool, config: SearchConfig, policy: Policy) -> None:
    whole = Growing()
    tree = await grow(instance(3), Line(can_snapshot=can_snapshot), policy, config, seed=11, on_expansion=whole)
    assert len(whole.expansions) > 5
    for cut in range(1, len(whole.expansions) + 1):
        log = Growing()

        def crash(expansion, log=log, cut=cut):  # type: ignore[no-untyped-def]
            log(expansion)
            if len(log.expansions) == cut:
                raise Cut

        with pytest.raises(Cut):
            await grow(instance(3), Line(can_snapshot=can_snapshot), policy, config, seed=11, on_expansion=crash)
        half = log.tree(tree)
        rest = Growing(half)
        resumed_tree = await grow(
            instance(3), Line(can_snapshot=can_snapshot), policy, config, seed=11, tree=half, on_expansion=rest
        )
        assert resumed_tree == tree
        assert log.expansions + rest.expansions == whole.expansions


async def test_cutting_repeatedly_changes_nothing() -> None:
    config = SearchConfig(dives=6, width=3, depth=5)
    tree = await grow(instance(3), Line(), Policy(), config, seed=4)
    half = None
    for _ in range(1000):
        log = Growing(half)

        def crash(expansion, log=log):  # type: ignore[no-untyped-def]
            log(expansion)
            raise Cut

        try:
            half = await grow(instance(3), Line(), Policy(), config, seed=4, tree=half, on_expansion=crash)
            break
        except Cut:
            half = log.tree(tree)
    assert half == tree
