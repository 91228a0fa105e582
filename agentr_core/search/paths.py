"""The paths of a tree, from the root to where an episode ended, and what two of them share."""

from __future__ import annotations

from agentr_core.search.tree import steps_to, way_to
from agentr_core.types import Path, Trajectory, Tree


def leaf_paths(tree: Tree, tree_id: str) -> tuple[Path, ...]:
    """Return a path for each leaf at which an episode ended, in the order in which the leaves were
    created.

    Open leaves, which were never expanded, end no episode; neither does a root whose prompt was too
    long.
    """
    return tuple(
        Path(
            tree_id=tree_id,
            nodes=way_to(tree.nodes, node.index),
            trajectory=Trajectory.ended(
                tree.instance, tree.first_observation, steps_to(tree.nodes, node.index), node.stop
            ),
        )
        for node in tree.nodes
        if node.stop is not None and node.step is not None
    )
