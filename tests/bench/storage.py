"""How fast steps go into the store, and how fast `v_lineage` finds the way back in a large one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

from measures import Clock, Measure

from agentr_core.search.tree import Arena, Draw, Expansion
from agentr_core.store.codec.trajectories import expansion_rows, load_trees, tree_rows
from agentr_core.store.database import Store, Writer
from agentr_core.store.tables import TreeHead
from agentr_core.types import Generation, Instance, Node, Step

WIDTH = 4
EXPANSIONS = 25
STEPS_PER_TREE = WIDTH * EXPANSIONS
TREES_PER_BURST = 5_000
DATASET_ROWS = 1_000
"""Rows of the dataset whose lineage is asked for; each is a revision sample with five verdicts."""


def measure(folder: Path, *, ingest: int, stored: int, clock: Clock) -> list[Measure]:
    """Return the speed of storing about `ingest` steps, and of a query on a synthetic store of
    about `stored`, and of loading a tree from it.
    """
    rate = asyncio.run(_ingest(Store(folder / "ingest.duckdb"), max(1, ingest // STEPS_PER_TREE), clock))
    store = Store(folder / "large.duckdb")
    steps = fill(store, max(20, stored // STEPS_PER_TREE))
    query = "select * from v_lineage where checkpoint_id = 'trained'"
    store.query(query)
    start = clock()
    rows = store.query(query)
    seconds = clock() - start
    if len(rows) != 5 * min(DATASET_ROWS, steps // STEPS_PER_TREE) or rows["reply"].isna().any():
        raise ValueError(f"v_lineage gave {len(rows)} rows")
    ((tree_id,),) = store.rows("select tree_id from pair where pair_id = 'pair1'")
    start = clock()
    (tree,) = load_trees(store, [tree_id]).values()
    loading = clock() - start
    return [
        Measure(
            name="store_ingest",
            value=rate,
            unit="steps/s",
            goal=">= 20000",
            note="search trees to committed rows, through the writer",
        ),
        Measure(
            name="lineage_query",
            value=seconds,
            unit="s",
            goal="< 1",
            note=f"{len(rows):,} rows of v_lineage for a checkpoint, in a store of {steps:,} steps and "
            f"{(folder / 'large.duckdb').stat().st_size / 2**20:,.0f} MiB",
        ),
        Measure(
            name="tree_load",
            value=loading,
            unit="s",
            goal="< 2",
            note=f"one tree of {len(tree.nodes)} nodes from that store",
        ),
    ]


async def _ingest(store: Store, trees: int, clock: Clock) -> float:
    store.write({})
    new_trees = list(_trees(trees))
    start = clock()
    async with Writer(store) as writer:
        for head, expansions in new_trees:
            arena = Arena(instance=head.instance, first_observation=head.first_observation, seed=head.seed)
            writer.add(tree_rows(head, arena.tree()))
            for expansion in expansions:
                writer.add(expansion_rows(head, expansion))
                await writer.room()
    seconds = clock() - start
    num_steps = store.query("select count(*) as n from node where parent >= 0")["n"][0]
    return float(num_steps / seconds)


def _trees(count: int) -> Iterator[tuple[TreeHead, list[Expansion]]]:
    """Yield trees that are one chain of expansions each: replies differ, observations often
    repeat.
    """
    rng = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    observations = [" ".join(rng.choices(words, k=8)) for _ in range(500)]
    for number in range(count):
        head = TreeHead(
            tree_id=f"{number:016x}",
            iteration_id="iteration",
            checkpoint_id="policy",
            config={},
            instance=Instance(environment="bench", split="train", index=number),
            first_observation=" ".join(rng.choices(words, k=60)),
            seed=number,
        )
        expansions = []
        for expansion in range(EXPANSIONS):
            first_child = 1 + WIDTH * expansion
            parent = max(0, first_child - WIDTH)
            draws, nodes = [], []
            for child in range(first_child, first_child + WIDTH):
                generation = Generation(
                    text=" ".join(rng.choices(words, k=12)),
                    token_ids=tuple(rng.choices(range(1300), k=30)),
                    finish_reason="stop",
                    prompt_tokens=200,
                    completion_tokens=30,
                )
                step = Step(
                    reply=generation.text,
                    action=generation.text[:20],
                    observation=rng.choice(observations),
                    reward=0.0,
                    token_ids=generation.token_ids,
                    finish_reason="stop",
                )
                nodes.append(Node(index=child, parent=parent, depth=expansion + 1, step=step))
                draws.append(
                    Draw(parent=parent, node=child, seed=expansion, number=child - first_child, generation=generation)
                )
            expansions.append(
                Expansion(
                    created=tuple(nodes), changed=(), draws=tuple(draws), dives_done=int(expansion == EXPANSIONS - 1)
                )
            )
        yield head, expansions


def fill(store: Store, trees: int) -> int:
    """Fill a store with trees, and with a checkpoint trained on some of them; return the number of
    steps.
    """
    grow, train = (Path(__file__).with_name(name).read_text() for name in ("synthetic.sql", "synthetic_dataset.sql"))
    for start in range(0, trees, TREES_PER_BURST):
        with store.transaction() as con:
            con.execute(
                f"set variable first_tree = {start}; set variable last_tree = {min(trees, start + TREES_PER_BURST)}"
            )
            con.execute(grow)
            if start + TREES_PER_BURST >= trees:
                con.execute(f"set variable trees = {trees}; set variable samples = {min(DATASET_ROWS, trees)}")
                con.execute(train)
    store.checkpoint()
    return trees * STEPS_PER_TREE
