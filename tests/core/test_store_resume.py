"""A search that is killed: its tree comes back as it was after some expansion, and grows on to the
same tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy
from toy import Growing, Line, Policy, instance

import agentr_core
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow
from agentr_core.store.codec.trajectories import (
    expansion_rows,
    finished_tree_rows,
    load_draws,
    load_trees,
    tree_rows,
    unfinished_tree_ids,
)
from agentr_core.store.database import Store, Writer
from agentr_core.store.tables import TreeHead
from agentr_core.types import Node, Tree

pytestmark = pytest.mark.slow

ROOT = Path(agentr_core.__file__).parents[1]
CONFIG = SearchConfig(dives=8, width=3, depth=6)
SEED = 11
SEARCH = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store_resume import search
from agentr_core.store import Store
asyncio.run(search(Store(Path(sys.argv[1])), pause=True))
"""


async def search(store: Store, *, pause: bool = False) -> Tree:
    """Grow the tree of one instance from where the store has it, each expansion a unit."""
    world, task = Line(), instance(3)
    head = TreeHead(
        tree_id="t",
        iteration_id="i",
        checkpoint_id="c",
        config=CONFIG.method,
        instance=task,
        first_observation=world.reset(task),
        seed=SEED,
    )
    async with Writer(store, interval_s=0.01) as writer:
        half = load_trees(store, ["t"]).get("t")
        if half is None:
            root = Node(index=0, parent=-1, depth=0, step=None)
            half = Tree(instance=task, first_observation=head.first_observation, nodes=(root,), dives_done=0, seed=SEED)
            writer.add(tree_rows(head, half))
            await writer.flush()
            print("begun", flush=True)  # noqa: T201

        def keep(expansion) -> None:  # type: ignore[no-untyped-def]
            writer.add(expansion_rows(head, expansion))
            if pause:
                time.sleep(0.005)

        tree = await grow(task, world, Policy(), CONFIG, seed=SEED, tree=half, on_expansion=keep)
        writer.add(finished_tree_rows(head, tree))
    return tree


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
async def test_a_killed_search_grows_on_to_the_same_tree(tmp_path: Path, delay: float) -> None:
    log = Growing()
    steps: list[Tree] = []
    whole = await grow(instance(3), Line(), Policy(), CONFIG, seed=SEED, on_expansion=log)
    replay = Growing()
    steps.append(replay.tree(whole))
    for expansion in log.expansions:
        replay(expansion)
        steps.append(replay.tree(whole))
    path = tmp_path / "agentr.duckdb"
    support = os.pathsep.join([str(ROOT), str(Path(toy.__file__).parent)])
    victim = subprocess.Popen(
        [sys.executable, "-c", SEARCH, str(path), str(Path(__file__).parent)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": support},
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "begun\n"
    time.sleep(delay)
    victim.kill()
    victim.communicate()
    store = Store(path)
    half = load_trees(store, ["t"]).get("t")
    assert half in steps
    assert unfinished_tree_ids(store, ["t"]) == ([] if half == whole and _done(store) else ["t"])
    assert await search(store) == whole
    assert load_trees(store, ["t"])["t"] == whole
    assert unfinished_tree_ids(store, ["t"]) == []
    stored_draws = [draw for draws in load_draws(store, "node", ["t"])["t"].values() for draw in draws]
    assert len(stored_draws) == sum(len(expansion.draws) for expansion in log.expansions)


def _done(store: Store) -> bool:
    return bool(store.query("select finished from tree")["finished"][0])
