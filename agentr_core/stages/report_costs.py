"""What served models read and wrote in an iteration, and what that costs at the recipe's prices."""

from __future__ import annotations

from agentr_core.recipes import ModelRole
from agentr_core.reports.records import Bill
from agentr_core.runtime.place import Workplace

_MILLION = 1_000_000


def bills(place: Workplace, iteration: int) -> tuple[Bill, ...]:
    """Return a bill for each role with a served model that said something in an iteration.

    A prompt counts once for each HTTP request, whatever number of replies it brought. Only what was
    kept is counted: tries that failed, and replies of episodes that were given up, may be on the
    server's own bill as well. Copies of another run's replies are on that run's bill.
    """
    recipe = place.recipe
    found = []
    for role, judging in _ROLES.items():
        model = recipe.model_of(role)
        if model.backend != "openai":
            continue
        row = place.one(_USED, place.iteration_id(iteration), judging, model.server.n_per_request)
        requests, prompt, completion = (int(number or 0) for number in row or (0, 0, 0))
        if requests:
            cost = (prompt * model.prices.prompt + completion * model.prices.completion) / _MILLION
            found.append(
                Bill(
                    role=role,
                    model=model.label,
                    requests=requests,
                    prompt=prompt,
                    completion=completion,
                    cost=cost if model.prices.prompt or model.prices.completion else None,
                )
            )
    return tuple(found)


_ROLES: dict[ModelRole, bool] = {"actor": False, "judge": True}
"""The roles whose replies are stored, and whether these are judgements."""

ASKED = """
    (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1 and copied_from is null))
    or (kind = 'judgement' and (owner_id, position) in (
        select (tree_id, node_index) from judgement where iteration_id = $1 and copied_from is null
    ))
    or (kind = 'step' and owner_id in (
        select trajectory_id from trajectory
        where iteration_id = $1 and source in ('episode', 'rollout') and copied_from is null
    ))
"""
"""Which rows of `generation` were asked for in iteration $1, and are no copies of another run's."""

# The replies to one request share owner and seed. A request for more than $3 replies was sent in
# parts (0: in one).
_USED = f"""
with request as (
    select if($3 = 0, 1, ceil(count(*) / $3)) as parts, max(prompt_tokens) as prompt,
        sum(completion_tokens) as completion
    from generation
    where seed is not null and (kind = 'judgement') = $2 and ({ASKED})
    group by kind, owner_id, seed
)
select sum(parts)::bigint, sum(parts * prompt)::bigint, sum(completion)::bigint from request
"""
