"""A search tree under construction, its statistics and the selection of nodes, and the changes that
each expansion makes to it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.types import Generation, Grading, Instance, Node, Step, StopReason, Trajectory, Tree, TreePath

# Back up a new leaf through its ancestors: pure functions that return the changed nodes by index.
#
# Source: Agent-R (arXiv 2501.11425), section 3.1. Only leaves that end an episode are backed up,
# once each, when their episode ends; a child whose episode goes on has no value until an episode
# ends below it.


def with_visit(node: Node, reward: float) -> Node:
    """Return the node after one more visit with a reward in [0, 1]."""
    return replace(node, visits=node.visits + 1, value_sum=node.value_sum + reward)


def back_up(nodes: Sequence[Node], leaf: int) -> dict[int, Node]:
    """Return the leaf and all its ancestors, by index, after one more visit with the leaf's reward.
    If the leaf is the root, the reward is 0.
    """
    step = nodes[leaf].step
    reward = step.reward if step else 0.0
    changed_nodes = {}
    index = leaf
    while index >= 0:
        changed_nodes[index] = with_visit(nodes[index], reward)
        index = nodes[index].parent
    return changed_nodes


def terminal_ancestors(nodes: Sequence[Node], children: Sequence[Sequence[int]], start: int) -> dict[int, Node]:
    """Return the nodes, by index, from `start` towards the root that become terminal because all
    their children are. It stops at the first node of which this is not true.
    """
    changed_nodes: dict[int, Node] = {}
    index = start
    while index >= 0 and not nodes[index].terminal and children[index]:
        if not all(child in changed_nodes or nodes[child].terminal for child in children[index]):
            break
        changed_nodes[index] = replace(nodes[index], terminal=True)
        index = nodes[index].parent
    return changed_nodes


# Select a child by UCT among those that are not terminal: pure functions over nodes.
#
# Source: Agent-R (arXiv 2501.11425), equation 2 with c = 0.25.


def uct(*, value_sum: float, visits: int, parent_visits: int, exploration: float) -> float:
    """Return W/N + c * sqrt(ln(N_parent) / N), or infinity for a child that was never visited.

    W is `value_sum`, N `visits`, c `exploration`. `parent_visits` must be at least 1 if `visits`
    is, which holds in every tree.
    """
    if visits == 0:
        return math.inf
    return value_sum / visits + exploration * math.sqrt(math.log(parent_visits) / visits)


def best_children(parent: Node, children: Sequence[Node], exploration: float) -> tuple[Node, ...]:
    """Return the children with the highest UCT among those that are not terminal: several on a tie,
    none if all are terminal.
    """
    scored_children = [
        (
            uct(
                value_sum=child.value_sum,
                visits=child.visits,
                parent_visits=parent.visits,
                exploration=exploration,
            ),
            child,
        )
        for child in children
        if not child.terminal
    ]
    highest_score = max((score for score, _ in scored_children), default=-math.inf)
    return tuple(child for score, child in scored_children if score == highest_score)


def select_child(parent: Node, children: Sequence[Node], *, exploration: float, seed: int, dive: int) -> Node | None:
    """Return the child with the highest UCT, or None if all are terminal. Ties are broken uniformly
    at random.

    The random stream for a tie is derived from (seed, dive, parent): no choice depends on the
    number of earlier draws, so a resumed search makes the same choices as an uninterrupted one.
    """
    best = best_children(parent, children, exploration)
    if len(best) <= 1:
        return best[0] if best else None
    return random.Random(derive_seed(seed, "select", dive, parent.index)).choice(best)


def descend(
    nodes: Sequence[Node],
    children: Sequence[Sequence[int]],
    start: int,
    *,
    exploration: float,
    seed: int,
    dive: int,
) -> int | None:
    """Go down from `start`, child after child; return the index of the unexpanded node reached, or
    None if it is terminal or all children of a node on the way are.

    `children[i]` are the indices of the children of node i, in the order of their creation.
    """
    index = start
    while children[index]:
        child = select_child(
            nodes[index], [nodes[i] for i in children[index]], exploration=exploration, seed=seed, dive=dive
        )
        if child is None:
            return None
        index = child.index
    return None if nodes[index].terminal else index


ROOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sampled reply: number `number` of the request with seed `seed`, drawn at node `parent`.

    `node` is the child that represents it: replies that count as equal share one child, whose step
    is made from the first of them.
    """

    parent: int
    node: int
    seed: int
    number: int
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """One step in the growth of a tree: the unit in which a search is stored and resumed.

    `created` are the new nodes and `changed` the earlier nodes whose statistics or flags changed,
    both in their new state. A search that resumes from the tree after any expansion continues as
    if it had not been interrupted.
    """

    created: tuple[Node, ...]
    changed: tuple[Node, ...]
    draws: tuple[Draw, ...]
    dives_done: int
    gradings: tuple[tuple[int, Grading], ...] = ()
    """(index of the last node, grade) of each path that ended and was graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one expansion changed in an arena: the nodes with indices from `first_created` on are
    new, those in `changed` have changed. `Arena.make_expansion` makes an `Expansion` from it.
    """

    first_created: int
    changed: frozenset[int]
    draws: tuple[Draw, ...] = ()
    gradings: tuple[tuple[int, Grading], ...] = ()


@dataclass(slots=True, kw_only=True)
class Arena:
    """A tree under construction: nodes by index, and the indices of each node's children in order
    of creation.
    """

    instance: Instance
    first_observation: str
    seed: int
    nodes: list[Node] = field(default_factory=lambda: [Node(index=ROOT, parent=-1, depth=0, step=None)])
    children: list[list[int]] = field(default_factory=lambda: [[]])
    dives_done: int = 0

    @classmethod
    def from_tree(cls, tree: Tree) -> Arena:
        """Return an arena that continues a stored tree. Raises `DataFault` if nodes are missing or
        out of order.
        """
        children: list[list[int]] = [[] for _ in tree.nodes]
        for position, node in enumerate(tree.nodes):
            if node.index != position or node.parent >= position or (node.parent < 0) != (position == ROOT):
                raise DataFault(
                    f"tree of {tree.instance.key}: node {node.index} with parent {node.parent} is at place {position}; "
                    "load all nodes of a tree in the order of their index"
                )
            if position != ROOT:
                children[node.parent].append(position)
        return cls(
            instance=tree.instance,
            first_observation=tree.first_observation,
            seed=tree.seed,
            nodes=list(tree.nodes),
            children=children,
            dives_done=tree.dives_done,
        )

    @property
    def session(self) -> str:
        """The `session` of all requests about this tree: `INSTANCE#SEED`."""
        return f"{self.instance.key}#{self.seed}"

    def tree(self) -> Tree:
        """Return the tree as it is now."""
        return Tree(
            instance=self.instance,
            first_observation=self.first_observation,
            nodes=tuple(self.nodes),
            dives_done=self.dives_done,
            seed=self.seed,
        )

    def add(
        self,
        parent: int,
        step: Step,
        stop: StopReason | None,
        *,
        duplicates: int = 1,
        terminal: bool | None = None,
        dive: int | None = None,
    ) -> int:
        """Append a child of `parent` without visits and return its index.

        `duplicates` is the number of sampled replies that it stands for. By default it is terminal
        if it has a stop reason, and belongs to the dive in progress.
        """
        index = len(self.nodes)
        node = Node(
            index=index,
            parent=parent,
            depth=self.nodes[parent].depth + 1,
            step=step,
            terminal=stop is not None if terminal is None else terminal,
            stop=stop,
            dive=self.dives_done if dive is None else dive,
            duplicates=duplicates,
        )
        self.nodes.append(node)
        self.children.append([])
        self.children[parent].append(index)
        return index

    def back_up(self, leaf: int) -> set[int]:
        """Add one visit with the leaf's reward to the leaf and all its ancestors; return the nodes'
        indices.
        """
        return self._replace_nodes(back_up(self.nodes, leaf))

    def close(self, start: int) -> set[int]:
        """Mark the nodes from `start` towards the root as terminal as long as all their children
        are; return the indices of the marked nodes.
        """
        return self._replace_nodes(terminal_ancestors(self.nodes, self.children, start))

    def replace_node(self, node: Node) -> None:
        """Replace the node with the same index."""
        self.nodes[node.index] = node

    def make_expansion(self, growth: Growth) -> Expansion:
        """Return what a growth created and changed, with the nodes as they are now."""
        first_created = growth.first_created
        return Expansion(
            created=tuple(self.nodes[first_created:]),
            changed=tuple(self.nodes[index] for index in sorted(growth.changed) if index < first_created),
            draws=growth.draws,
            dives_done=self.dives_done,
            gradings=growth.gradings,
        )

    def _replace_nodes(self, changed_nodes: Mapping[int, Node]) -> set[int]:
        for node in changed_nodes.values():
            self.replace_node(node)
        return set(changed_nodes)


def apply_expansion(tree: Tree, expansion: Expansion) -> Tree:
    """Return the tree after an expansion; `tree` must be in the state just before it."""
    nodes = [*tree.nodes, *expansion.created]
    for node in expansion.changed:
        nodes[node.index] = node
    return replace(tree, nodes=tuple(nodes), dives_done=expansion.dives_done)


def steps_to(nodes: Sequence[Node], index: int) -> tuple[Step, ...]:
    """Return the steps from the root to a node, the node's own last."""
    return tuple(step for i in path_to(nodes, index) if (step := nodes[i].step) is not None)


def path_to(nodes: Sequence[Node], index: int) -> tuple[int, ...]:
    """Return the indices of the nodes on the path from the root, which is left out, to a node."""
    path = []
    while index > ROOT:
        path.append(index)
        index = nodes[index].parent
    return tuple(reversed(path))


# The paths of a tree, from the root to the leaves at which an episode ended.


def leaf_paths(tree: Tree, tree_id: str) -> tuple[TreePath, ...]:
    """Return a path for each leaf at which an episode ended, in the order in which the leaves were
    created.

    Leaves that were never expanded have no path, nor has a root whose prompt was too long.
    """
    return tuple(
        TreePath(
            tree_id=tree_id,
            nodes=path_to(tree.nodes, node.index),
            trajectory=Trajectory.ended(
                tree.instance, tree.first_observation, steps_to(tree.nodes, node.index), node.stop
            ),
        )
        for node in tree.nodes
        if node.stop is not None and node.step is not None
    )
