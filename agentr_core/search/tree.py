"""A tree under construction, and the report of each growth."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.types import Generation, Grading, Instance, Node, Path, Step, StopReason, Trajectory, Tree

# The changes that a new leaf makes to its ancestors, as pure functions that return the changed
# nodes by index.
#
# Source: Agent-R (arXiv 2501.11425), section 3.1. Only leaves that end an episode are backed up,
# once each, when they are created; a child whose episode goes on has no value until an episode ends
# below it.


def visited(node: Node, reward: float) -> Node:
    """Return the node after one more visit, with `reward` in [0, 1]."""
    return replace(node, visits=node.visits + 1, value_sum=node.value_sum + reward)


def back_up(nodes: Sequence[Node], leaf: int) -> dict[int, Node]:
    """Return the leaf and all its ancestors after a visit with the leaf's reward; the root's own
    reward is 0.
    """
    step = nodes[leaf].step
    reward = step.reward if step else 0.0
    changed_nodes = {}
    index = leaf
    while index >= 0:
        changed_nodes[index] = visited(nodes[index], reward)
        index = nodes[index].parent
    return changed_nodes


def close(nodes: Sequence[Node], children: Sequence[Sequence[int]], start: int) -> dict[int, Node]:
    """Return the nodes from `start` upwards that become terminal because all their children are
    terminal.
    """
    changed_nodes: dict[int, Node] = {}
    index = start
    while index >= 0 and not nodes[index].terminal and children[index]:
        if not all(child in changed_nodes or nodes[child].terminal for child in children[index]):
            break
        changed_nodes[index] = replace(nodes[index], terminal=True)
        index = nodes[index].parent
    return changed_nodes


# The selection of a child: UCT over children that are not terminal, as pure functions over nodes.
#
# Source: Agent-R (arXiv 2501.11425), equation 2 with c = 0.25.


def uct(*, value_sum: float, visits: int, parent_visits: int, exploration: float) -> float:
    """Return W/N + c * sqrt(ln(N_parent) / N), or infinity for a child that was never visited.

    A visited child has a visited parent, so `parent_visits` is at least 1 where it is used.
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
    highest = max((score for score, _ in scored_children), default=-math.inf)
    return tuple(child for score, child in scored_children if score == highest)


def select_child(parent: Node, children: Sequence[Node], *, exploration: float, seed: int, dive: int) -> Node | None:
    """Return the child to go to, or None when all are terminal. Ties are broken uniformly.

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
    """Return the index of the unexpanded node reached from `start`, or None when only terminal
    nodes are reached.

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
    """One growth of a tree: the unit in which a search is stored and resumed.

    `created` are the new nodes and `changed` the earlier nodes whose statistics changed, both as
    they are afterwards. A tree that holds exactly the expansions up to this one, with this
    `dives_done`, resumes as if never interrupted.
    """

    created: tuple[Node, ...]
    changed: tuple[Node, ...]
    draws: tuple[Draw, ...]
    dives_done: int
    gradings: tuple[tuple[int, Grading], ...] = ()
    """Grades of paths that ended, each with the index of the last node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The nodes that one growth created (from `first_created` on) and changed (`touched`), by
    index.
    """

    first_created: int
    touched: frozenset[int]
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
    def of(cls, tree: Tree) -> Arena:
        """Return the arena of a stored tree. Raises `DataFault` when nodes are missing or out of
        order.
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
        """The name under which models are asked about this tree."""
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
        """Append a child without statistics and return its index.

        By default it is terminal if it has a stop reason, and made by the dive in progress.
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
        """Count one visit of a leaf, with its reward, at each node up to the root; return the
        indices of these nodes.
        """
        return self._put(back_up(self.nodes, leaf))

    def close(self, start: int) -> set[int]:
        """Make the nodes from `start` upwards terminal whose children all are; return their
        indices.
        """
        return self._put(close(self.nodes, self.children, start))

    def put(self, node: Node) -> None:
        """Replace the node with the same index."""
        self.nodes[node.index] = node

    def report(self, growth: Growth) -> Expansion:
        """Return the expansion that reports a growth, with the nodes as they are now."""
        first = growth.first_created
        return Expansion(
            created=tuple(self.nodes[first:]),
            changed=tuple(self.nodes[index] for index in sorted(growth.touched) if index < first),
            draws=growth.draws,
            dives_done=self.dives_done,
            gradings=growth.gradings,
        )

    def _put(self, changed_nodes: Mapping[int, Node]) -> set[int]:
        for node in changed_nodes.values():
            self.put(node)
        return set(changed_nodes)


def apply_expansion(tree: Tree, expansion: Expansion) -> Tree:
    """Return a tree as it is after one more expansion."""
    nodes = [*tree.nodes, *expansion.created]
    for node in expansion.changed:
        nodes[node.index] = node
    return replace(tree, nodes=tuple(nodes), dives_done=expansion.dives_done)


def steps_to(nodes: Sequence[Node], index: int) -> tuple[Step, ...]:
    """Return the steps from the root to a node, the node's own last."""
    return tuple(step for i in path_to(nodes, index) if (step := nodes[i].step) is not None)


def path_to(nodes: Sequence[Node], index: int) -> tuple[int, ...]:
    """Return the indices from the first node after the root to a node."""
    path = []
    while index > ROOT:
        path.append(index)
        index = nodes[index].parent
    return tuple(reversed(path))


# The paths of a tree, from the root to where an episode ended, and what two of them share.


def leaf_paths(tree: Tree, tree_id: str) -> tuple[Path, ...]:
    """Return a path for each leaf at which an episode ended, in the order in which the leaves were
    created.

    Open leaves, which were never expanded, end no episode; neither does a root whose prompt was too
    long.
    """
    return tuple(
        Path(
            tree_id=tree_id,
            nodes=path_to(tree.nodes, node.index),
            trajectory=Trajectory.ended(
                tree.instance, tree.first_observation, steps_to(tree.nodes, node.index), node.stop
            ),
        )
        for node in tree.nodes
        if node.stop is not None and node.step is not None
    )
