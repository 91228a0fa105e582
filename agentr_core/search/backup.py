"""The changes that a new leaf makes to its ancestors, as pure functions that return the changed
nodes by index.

Source: Agent-R (arXiv 2501.11425), section 3.1. Only leaves that end an episode are backed up, once
each, when they are created; a child whose episode goes on has no value until an episode ends below
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentr_core.types import Node


def visited(node: Node, reward: float) -> Node:
    """Return the node after one more visit, with `reward` in [0, 1]."""
    return replace(node, visits=node.visits + 1, value_sum=node.value_sum + reward)


def back_up(nodes: Sequence[Node], leaf: int) -> dict[int, Node]:
    """Return the leaf and all its ancestors after a visit with the leaf's reward; the root's own
    reward is 0.
    """
    step = nodes[leaf].step
    reward = step.reward if step else 0.0
    changed = {}
    index = leaf
    while index >= 0:
        changed[index] = visited(nodes[index], reward)
        index = nodes[index].parent
    return changed


def close(nodes: Sequence[Node], children: Sequence[Sequence[int]], start: int) -> dict[int, Node]:
    """Return the nodes from `start` upwards that become terminal because all their children are
    terminal.
    """
    changed: dict[int, Node] = {}
    index = start
    while index >= 0 and not nodes[index].terminal and _exhausted(nodes, children[index], changed):
        changed[index] = replace(nodes[index], terminal=True)
        index = nodes[index].parent
    return changed


def _exhausted(nodes: Sequence[Node], children: Sequence[int], changed: Mapping[int, Node]) -> bool:
    return bool(children) and all(index in changed or nodes[index].terminal for index in children)
