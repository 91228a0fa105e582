"""What served models read and wrote in an iteration, and what that costs at the recipe's prices."""

from __future__ import annotations

from typing import get_args

from agentr_core.recipes.models import ModelRole
from agentr_core.reports.records import Bill
from agentr_core.runtime.place import Workplace
from agentr_core.store.queries.usage import request_use

_MILLION = 1_000_000


def bills(place: Workplace, iteration: int) -> tuple[Bill, ...]:
    """Return a bill for each role whose served model replied in an iteration.

    A prompt counts once for each HTTP request, however many replies it brought. Only what was kept
    is counted: tries that failed, and replies of episodes that were given up, may be on the
    server's own bill as well. Copies of another run's replies are on that run's bill. Where a
    teacher answered for a role without a model of its own, that is on the teacher's bill.
    """
    recipe = place.recipe
    taught = iteration > 0 and place.collector(iteration).role == "teacher"
    lent = [role for role in get_args(ModelRole) if role not in recipe.own_models()] if taught else []
    asking = [stage.roles for stage in place.plan(iteration).stages if "teacher" in stage.roles]
    edited = [role for role in lent if any(role in roles for roles in asking)]
    found = []
    for role in get_args(ModelRole):
        model = recipe.model_of(role)
        if model.backend != "openai":
            continue
        used = request_use(
            place.store,
            place.iteration_id(iteration),
            role=role,
            per_request=model.server.n_per_request,
            taught=taught,
            lent=lent,
            edited=edited,
        )
        if used.requests:
            cost = (used.prompt * model.prices.prompt + used.completion * model.prices.completion) / _MILLION
            found.append(
                Bill(
                    role=role,
                    model=model.label,
                    requests=used.requests,
                    prompt=used.prompt,
                    completion=used.completion,
                    cost=cost if model.prices.prompt or model.prices.completion else None,
                )
            )
    return tuple(found)
