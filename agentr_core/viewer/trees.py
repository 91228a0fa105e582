"""The pages of search trees, their nodes, and the pairs that were taken from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from markupsafe import Markup

from agentr_core.store import Store
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.queries.lineage import ancestry
from agentr_core.store.queries.paths import ToolCall, node_steps, tool_calls
from agentr_core.store.queries.trees import (
    TreeNode,
    pair_head,
    pairs_of_tree,
    samples_of_pair,
    tree_head,
    tree_nodes,
    verdicts_of_pair,
)
from agentr_core.viewer import drawing
from agentr_core.viewer.page import Page


def tree(store: Store, tree_id: str) -> Page | None:
    """Return the page of a search tree, drawn."""
    head = tree_head(store, tree_id)
    if head is None:
        return None
    nodes = tree_nodes(store, tree_id)
    pairs = pairs_of_tree(store, tree_id)
    good = _ways(nodes, (leaf for _, leaf, _ in pairs))
    bad = _ways(nodes, (leaf for _, _, leaf in pairs))
    first = [_ways(nodes, [leaf]) for _, *leaves in pairs[:1] for leaf in leaves]
    drawable = 0 < len(nodes) <= drawing.MOST_NODES
    drawn = Markup(drawing.tree(nodes, tree_id, good, bad, first)) if drawable else None
    values = {
        "head": head,
        "nodes": nodes,
        "pairs": pairs,
        # The only markup of a page that does not come from its template: made by `drawing`, which
        # escapes texts.
        "drawing": drawn,
        "ancestry": ancestry(store, tree_id, "tree"),
    }
    return Page("tree", values)


def node(store: Store, tree_id: str, index: int) -> Page | None:
    """Return the page of a node: the path to it, step by step, and the siblings it was chosen
    from.
    """
    head = tree_head(store, tree_id)
    nodes = {one.number: one for one in tree_nodes(store, tree_id)} if head else {}
    if head is None or index not in nodes:
        return None
    calls = tool_calls(store, "node", tree_id)
    steps = node_steps(store, tree_id, _ways(nodes.values(), [index]))
    way = {step.node: step.position for step in steps}
    values = {
        "head": head,
        "node": nodes[index],
        "steps": steps,
        "siblings": {step.node: _siblings(nodes.values(), nodes[step.node]) for step in steps if step.node is not None},
        "children": [one for one in nodes.values() if one.parent == index],
        "calls": by_position([c._replace(position=way[c.position]) for c in calls if c.position in way]),
        "ancestry": ancestry(store, f"{tree_id}#{index}", "node"),
    }
    return Page("node", values)


def pair(store: Store, pair_id: str) -> Page | None:
    """Return the page of a pair: its good and its bad path side by side."""
    head = pair_head(store, pair_id)
    if head is None:
        return None
    nodes = tree_nodes(store, head.tree_id)
    on_good, on_bad = _ways(nodes, [head.good_leaf]), _ways(nodes, [head.bad_leaf])
    steps = node_steps(store, head.tree_id, on_good | on_bad)
    good = [step for step in steps if step.node in on_good]
    bad = [step for step in steps if step.node in on_bad]
    samples = samples_of_pair(store, pair_id)
    values = {
        "head": head,
        "shared": bad[: head.shared_steps],
        "good": good[head.shared_steps :],
        "bad": bad[head.shared_steps :],
        "verdicts": {verdict.position: verdict for verdict in verdicts_of_pair(store, pair_id)},
        "samples": samples,
        "splices": load_samples(store, [sample.sample_id for sample in samples[:1]]),
        "ancestry": ancestry(store, pair_id, "pair"),
    }
    return Page("pair", values)


def by_position(calls: Sequence[ToolCall]) -> dict[int, list[ToolCall]]:
    """Return calls of tools by the step that made them."""

    def place(call: ToolCall) -> int:
        return call.position

    return {position: list(some) for position, some in groupby(sorted(calls, key=place), key=place)}


def _ways(nodes: Collection[TreeNode], leaves: Iterable[int]) -> set[int]:
    """Return the numbers of some nodes and of all their ancestors."""
    parents = {node.number: node.parent for node in nodes}
    found: set[int] = set()
    for leaf in leaves:
        while leaf in parents and leaf not in found:
            found.add(leaf)
            leaf = parents[leaf]
    return found


def _siblings(nodes: Collection[TreeNode], chosen: TreeNode) -> list[TreeNode]:
    return [one for one in nodes if one.parent == chosen.parent and one.number != chosen.number]
