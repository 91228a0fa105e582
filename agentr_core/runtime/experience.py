"""How far the experience of an iteration has been turned into a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.runtime.place import Product, Stage, Workplace
from agentr_core.store.queries.iterations import iteration_state, trained_outside
from agentr_core.store.queries.published import published


def has_begun(place: Workplace, iteration: int) -> bool:
    """Return whether an iteration is in the store."""
    return iteration_state(place.store, place.iteration_id(iteration)) is not None


def made(place: Workplace, iteration: int) -> frozenset[Product]:
    """Return what an iteration has made so far."""
    found = published(place.store, place.iteration_id(iteration))
    products: dict[Product, str | None] = {"dataset": found.dataset_id, "checkpoint": found.checkpoint_id}
    return frozenset(product for product, key in products.items() if key is not None)


def settled(place: Workplace, iteration: int) -> Sequence[Stage]:
    """Return the stages of an iteration that add nothing more: what is trained on its data, here or
    in another run, has been made.
    """
    plan = place.plan(iteration)
    drawn_on = place.method.drawn_on(place) if iteration else ()
    own = plan.settled(made(place, iteration))
    if any(one.iteration == iteration for one in trained_outside(place.store, place.run_id)):
        own = plan.stages[: 1 + max(at for at, stage in enumerate(plan.stages) if stage.makes == "checkpoint")]
    return [stage for stage in plan.stages if stage in own or stage in drawn_on]
