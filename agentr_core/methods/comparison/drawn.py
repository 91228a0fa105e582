"""What the arms of a comparison have made of its pool so far."""

from __future__ import annotations

from agentr_core.methods.comparison import stages_for
from agentr_core.runtime.place import Stage, Workplace
from agentr_core.store.queries.runs import spliced_anew, uses_of_pool


def drawn_on(place: Workplace) -> tuple[Stage, ...]:
    """Return the stages of a pool that an arm has made its dataset of. What these have lost stays
    lost, or later arms would be trained on another pool.
    """
    if place.recipe.compare.pool:
        return ()
    uses = uses_of_pool(place.store, place.run_id)
    return stages_for(place.recipe, uses, lends_trees=spliced_anew(place.store, place.run_id))
