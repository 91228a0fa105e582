"""A stored tree: any change of the search's arithmetic, order or random streams shows here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from toy import Line, Policy, instance

from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.grow import grow
from agentr_core.types import Tree


async def test_tree(golden: Callable[[str, str], None]) -> None:
    config = SearchConfig(dives=4, width=3, depth=5)
    tree = await grow(instance(1), Line(), Policy(), config, seed=20250120)
    golden("tree.json", render_tree(tree))


def render_tree(tree: Tree) -> str:
    """Return readable JSON: one line for each node, its token ids left out, and what no window left
    out.
    """
    nodes = []
    for node in tree.nodes:
        row = dataclasses.asdict(node)
        if row["step"]:
            for name in ("token_ids", "logprobs", "finish_reason", "tokenizer", "dropped", "tool_calls", "answers"):
                del row["step"][name]
        nodes.append(json.dumps(row))
    head = {
        "instance": tree.instance.key,
        "first_observation": tree.first_observation,
        "dives_done": tree.dives_done,
        "seed": tree.seed,
    }
    lines = ",\n  ".join(nodes)
    return json.dumps(head, indent=1)[:-2] + f',\n "nodes": [\n  {lines}\n ]\n}}\n'
