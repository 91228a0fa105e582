"""The selection of a child: UCT over children that are not terminal, as pure functions over nodes.

Source: Agent-R (arXiv 2501.11425), equation 2 with c = 0.25.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from agentr_core.fingerprint import derive_seed
from agentr_core.types import Node


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
    scored = [
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
    highest = max((score for score, _ in scored), default=-math.inf)
    return tuple(child for score, child in scored if score == highest)


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
        found = select_child(
            nodes[index], [nodes[i] for i in children[index]], exploration=exploration, seed=seed, dive=dive
        )
        if found is None:
            return None
        index = found.index
    return None if nodes[index].terminal else index
