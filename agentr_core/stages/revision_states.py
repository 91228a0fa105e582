"""The states of the revision test: chosen once for a run, stored, and the same for every model that
is tested.
"""

from __future__ import annotations

from dataclasses import replace

from agentr_core.episodes.conversation import of_another_run
from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.evaluation.revision import revision_plans, revision_seed
from agentr_core.runtime.instances import held_out
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.trajectories import load_episodes, load_trajectories
from agentr_core.store.queries import revision_states as queries
from agentr_core.store.queries.runs import run_seed
from agentr_core.store.snapshot import snapshot
from agentr_core.store.tables import Row


def revision_states(place: Workplace, base_evaluation: str) -> tuple[EpisodePlan, ...]:
    """Return the episodes of the revision test: those of the run that the recipe names, else those
    of this run.

    This run's are chosen from the failed episodes of evaluation `base_evaluation` when they are
    first needed.

    Raises:
        DataFault: the other run has no states, or they are of another environment; or the first
            model of this run was not evaluated before.
    """
    with snapshot(place.store) as state:
        return _states(replace(place, store=state), base_evaluation)


def _states(place: Workplace, base_evaluation: str) -> tuple[EpisodePlan, ...]:
    other = place.recipe.evaluation.revision_test.states
    if other:
        found = _load(place, other)
        if not found:
            raise DataFault(
                f"run {other} has no states of a revision test; name a run whose first model was evaluated, in "
                "evaluation.revision_test.states"
            )
        own = {instance.environment for some in held_out(place).values() for instance in some}
        strange = next((p for p in found if p.instance.environment not in own), None)
        if strange is not None:
            raise DataFault(f"the states of run {other} are of {strange.instance.environment}, not of this environment")
        return tuple(replace(plan, prefix=of_another_run(plan.prefix)) for plan in found)
    owner = place.recipe.compare.pool or place.run_id
    return _load(place, owner) or _choose(place, owner, base_evaluation)


def _load(place: Workplace, run_id: str) -> tuple[EpisodePlan, ...]:
    states = queries.revision_states(place.store, run_id)
    trajectories = load_trajectories(place.store, list({state.trajectory_id for state in states}))
    seed = _seed(place)
    return tuple(
        EpisodePlan(
            instance=trajectories[state.trajectory_id].instance,
            number=state.repeat,
            seed=revision_seed(seed, trajectories[state.trajectory_id].instance, state.repeat, state.cut),
            prefix=trajectories[state.trajectory_id].steps[: state.cut],
        )
        for state in states
    )


def _choose(place: Workplace, run_id: str, base_evaluation: str) -> tuple[EpisodePlan, ...]:
    config = place.recipe.evaluation.revision_test
    base = load_episodes(place.store, base_evaluation)
    if not base:
        raise DataFault(f"run {place.run_id} has no episodes of its first model yet; evaluate iteration 0 first")
    cuts, rejected = revision_plans([(e.repeat, e.trajectory) for e in base], cuts=config.cuts, seed=_seed(place))
    limit = min(config.limit or len(cuts), len(cuts))
    plans = tuple(cuts[position * len(cuts) // limit] for position in range(limit))
    played = {(episode.instance.key, episode.repeat): episode.trajectory_id for episode in base}
    rows: list[Row] = [
        {
            "run_id": run_id,
            "position": position,
            "trajectory_id": played[plan.instance.key, plan.number],
            "repeat": plan.number,
            "cut": len(plan.prefix),
        }
        for position, plan in enumerate(plans)
    ]
    place.store.write({"revision_state": rows, **rejection_rows(rejected, iteration_id=place.iteration_id(0))})
    return plans


def _seed(place: Workplace) -> int:
    """Return the seed of the cuts: all arms of a comparison use the same cuts."""
    pool = run_seed(place.store, place.recipe.compare.pool)
    return place.recipe.seed if pool is None else pool
