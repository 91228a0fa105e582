"""Derivations of trajectories from others, to rows."""

from __future__ import annotations

from collections.abc import Iterable

from agentr_core.store.tables import Rows
from agentr_core.types import Derivation


def derivation_rows(derivations: Iterable[Derivation], *, iteration_id: str) -> Rows:
    """Return the rows of derivations; store them with the trajectories of the children."""
    return {
        "derivation": [
            {
                "child_id": made.child,
                "parent_id": made.parent,
                "operator": made.operator,
                "position": made.position,
                "prompt_hash": made.prompt_hash,
                "seed": made.seed,
                "round": made.round,
                "iteration_id": iteration_id,
            }
            for made in derivations
        ]
    }
