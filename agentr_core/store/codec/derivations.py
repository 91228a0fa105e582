"""Derivations of trajectories from others, to rows and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentr_core.store.database import Store
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


def load_derivations(store: Store, children: Sequence[str]) -> dict[str, tuple[Derivation, ...]]:
    """Return the derivations of some trajectories, by child and ordered by parent.

    Trajectories that were derived from none are left out. Raises as `Store.reading` does.
    """
    found: dict[str, tuple[Derivation, ...]] = {}
    for child, parent, operator, position, prompt_hash, seed, round_ in store.rows(_DERIVATIONS, list(children)):
        made = Derivation(
            child=child,
            parent=parent,
            operator=operator,
            position=position,
            prompt_hash=prompt_hash,
            seed=seed,
            round=round_,
        )
        found[child] = (*found.get(child, ()), made)
    return found


_DERIVATIONS = """
select child_id, parent_id, operator, position, prompt_hash, seed, round from derivation
where child_id in (select unnest(?))
order by child_id, parent_id
"""
