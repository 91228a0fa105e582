"""Evaluation of a checkpoint: the held-out instances, and recovery from the base model's
failures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan, episode_plans
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import EpisodeShard, EpisodeShards, with_ungraded
from agentr_core.runtime.equipment import Checkpoint
from agentr_core.runtime.instances import held_out
from agentr_core.runtime.place import Workplace
from agentr_core.stages.lost_episodes import counted_episodes, ended_episodes, lost_rows
from agentr_core.stages.measures import OF_REVISION, Measures, load_measures, measure, measure_rows, measure_worlds
from agentr_core.stages.revision_states import revision_states
from agentr_core.store import Store
from agentr_core.store.codec.ledger import evaluation_rows
from agentr_core.store.codec.trajectories import Episode, load_episodes
from agentr_core.store.queries.evaluations import finished_evaluations
from agentr_core.store.queries.iterations import checkpoint_promoted
from agentr_core.store.snapshot import snapshot
from agentr_core.store.tables import Rows, merge
from agentr_core.types import EpisodeLimits, Sampling

STAGE = "evaluate"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The episodes of one evaluation of a checkpoint, and how they are played."""

    evaluation_id: str
    name: str
    split: str
    plans: tuple[EpisodePlan, ...]
    sampling: Sampling
    max_steps: int
    repeats: int
    limits: EpisodeLimits
    config: Any
    """What the row of the evaluation stores about it: a record."""


def evaluation_id(place: Workplace, iteration: int, name: str) -> str:
    """Return the id of an evaluation of the checkpoint that an iteration made (0: the base
    model).
    """
    recipe = place.recipe
    iteration_id = place.iteration_id(iteration) if iteration else place.source_id(0)
    # Neither further sets nor the choice of the development set may change the ids of other
    # evaluations.
    alone = dataclasses.replace(recipe.evaluation, sets={}, development="")
    further = [recipe.evaluation.sets[name]] if name in recipe.evaluation.sets else []
    worlds = recipe.environments or recipe.instances
    return fingerprint("evaluation", VERSION, iteration_id, name, alone, worlds, *further)


async def evaluate(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the missing episodes of the evaluations of an iteration's checkpoint, and promote the
    checkpoint that the next iteration goes on from; return the success of each evaluation.

    The revision test continues failed episodes of the base model.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: the checkpoint is missing, iteration 0 was not evaluated before, or no checkpoint
            has episodes by which it could be promoted.
    """
    scores = await _evaluate(place, iteration)
    if place.recipe.promote == "best":
        _promote_best(place, iteration)
    return scores


async def _evaluate(place: Workplace, iteration: int) -> dict[str, Any]:
    series = _from_the_beginning(place, iteration)
    if not place.recipe.evaluation.revision_test.enabled:
        return await _play(place, iteration, series)
    if iteration == 0:
        scores = await _play(place, iteration, series)
        return scores | await _play(place, iteration, [_revision(place, iteration)])
    return await _play(place, iteration, [*series, _revision(place, iteration)])


def _promote_best(place: Workplace, iteration: int) -> None:
    """Store which of the checkpoints up to an iteration succeeds most often on the development set;
    of equals the earliest, since a later one has nothing to show for its training.

    A stored choice is not changed: later iterations were made with it.
    """
    iteration_id, name = place.iteration_id(iteration), place.recipe.evaluation.development
    if checkpoint_promoted(place.store, iteration_id) is not None:
        return
    measured = (load_measures(place.store, evaluation_id(place, number, name)) for number in range(iteration + 1))
    successes = {number: found["success"].mean for number, found in enumerate(measured) if found}
    if not successes:
        raise DataFault(
            f"no episode of set {name} came to its end, so no checkpoint can be promoted; `select * from event` says "
            "what failed"
        )
    best = max(successes, key=lambda number: (successes[number], -number))
    place.store.update("iteration", {"iteration_id": iteration_id, "promoted": place.trained(best).id})


def _from_the_beginning(place: Workplace, iteration: int) -> list[Series]:
    """Return the evaluations that an iteration's checkpoint plays, except the revision test."""
    recipe, config = place.recipe, place.recipe.evaluation
    further = {name: chosen for name, chosen in config.sets.items() if chosen.models == "all" or iteration == 0}
    instances = held_out(place)
    seed = derive_seed(recipe.seed, "evaluate", iteration)
    test = episode_plans(instances[TEST], episodes=config.episodes, seed=seed)
    series = [_series(place, iteration, TEST, _test_split(recipe), test)]
    for name, chosen in further.items():
        plans = episode_plans(instances[name], episodes=chosen.episodes, seed=derive_seed(seed, name))
        series.append(_series(place, iteration, name, chosen.split, plans))
    return series


def _revision(place: Workplace, iteration: int) -> Series:
    """Return the revision test: episodes that go on from failed prefixes of the base model."""
    states = revision_states(place, evaluation_id(place, 0, TEST))
    split = _test_split(place.recipe)
    return _series(place, iteration, REVISION, split, states)


def _series(place: Workplace, iteration: int, name: str, split: str, plans: tuple[EpisodePlan, ...]) -> Series:
    config = place.recipe.evaluation
    drawn = config.sets.get(name, config)
    return Series(
        evaluation_id=evaluation_id(place, iteration, name),
        name=name,
        split=split,
        plans=limited(place.recipe, name, plans),
        sampling=drawn.sampling(temperature=drawn.temperature, max_new_tokens=config.max_new_tokens),
        max_steps=config.revision_test.max_steps if name == REVISION else config.max_steps,
        repeats=config.repeats,
        limits=config.limits,
        config=drawn,
    )


def limited(recipe: Recipe, name: str, plans: Iterable[EpisodePlan]) -> tuple[EpisodePlan, ...]:
    """Return plans with the limits of their worlds; the revision test has one step limit for all
    worlds.
    """
    limits = {world: own.evaluation for world, own in recipe.worlds().items()}
    told = []
    for plan in plans:
        own = limits[recipe.world_name(plan.instance.environment)]
        steps = recipe.evaluation.revision_test.max_steps if name == REVISION else own.max_steps
        told.append(dataclasses.replace(plan, max_steps=steps, repeats=own.repeats))
    return tuple(told)


def _test_split(recipe: Recipe) -> str:
    """Return the name of the split that is tested; for several worlds, the distinct names."""
    return "+".join(dict.fromkeys(world.instances.test for world in recipe.worlds().values()))


async def _play(place: Workplace, iteration: int, series: Sequence[Series]) -> dict[str, Any]:
    """Play the missing episodes of several evaluations together; return the success of each by
    name.
    """
    anything = await play_evaluations(place, iteration, series)
    with snapshot(place.store) as state:
        now = dataclasses.replace(place, store=state)
        found = [(one, measure_evaluation(now, iteration, one.name)) for one in series]
    keep_measures(place, iteration, found)
    scores = {one.name: asdict(measures["success"]) if measures else {"n": 0} for one, measures in found}
    if anything:
        _measure_later(place, iteration, scores.keys())
    return scores


async def play_evaluations(place: Workplace, iteration: int, series: Sequence[Series]) -> bool:
    """Play the episodes of several evaluations that are not stored yet, all together; return
    whether there were any.

    Episodes that failed for good are kept as rejections. Raises as `evaluate`.
    """
    checkpoint = place.trained(iteration)
    place.store.write(merge(_head(place, iteration, one, checkpoint, finished=False) for one in series))
    with snapshot(place.store) as state:
        now = dataclasses.replace(place, store=state)
        shards = tuple(shard for one in series if len(shard := _missing(now, iteration, one, checkpoint)))
    if not shards:
        return False
    names = ", ".join(shard.name for shard in shards)
    await place.work_through(EpisodeShards(parts=shards), f"{STAGE} {names}", iteration, f"episodes of {names}")
    with snapshot(place.store) as state:
        lost = merge(_lost(state, one, place.iteration_id(iteration)) for one in series)
    if any(lost.values()):
        place.store.write(lost)
    return True


def _lost(store: Store, one: Series, iteration_id: str) -> Rows:
    played = load_episodes(store, one.evaluation_id)
    return lost_rows(one.evaluation_id, one.plans, played, iteration_id=iteration_id)


def keep_measures(place: Workplace, iteration: int, found: Sequence[tuple[Series, Measures]]) -> None:
    """Store the measures of evaluations, which finishes them."""
    checkpoint = place.trained(iteration)
    heads = (_head(place, iteration, one, checkpoint, finished=True) for one, _ in found)
    place.store.write(merge([*heads, *(measure_rows(one.evaluation_id, measures) for one, measures in found)]))


def _head(place: Workplace, iteration: int, one: Series, checkpoint: Checkpoint, *, finished: bool) -> Rows:
    return evaluation_rows(
        one.evaluation_id,
        iteration_id=place.iteration_id(iteration),
        checkpoint_id=checkpoint.id,
        name=one.name,
        split=one.split,
        config=one.config,
        finished=finished,
    )


def _missing(place: Workplace, iteration: int, one: Series, checkpoint: Checkpoint) -> EpisodeShard:
    """Return the episodes of an evaluation that are not stored yet."""
    done = {(e.instance.key, e.repeat, e.cut) for e in load_episodes(place.store, one.evaluation_id)}
    left = tuple(p for p in one.plans if (p.instance.key, p.number, len(p.prefix)) not in done)
    shard = EpisodeShard(
        stage=STAGE,
        evaluation_id=one.evaluation_id,
        name=one.name,
        iteration=iteration,
        checkpoint=checkpoint,
        plans=left,
        sampling=one.sampling,
        max_steps=one.max_steps,
        repeats=one.repeats,
        limits=one.limits,
        done=len(one.plans) - len(left),
        total=len(one.plans),
    )
    return with_ungraded(place.store, shard, place.iteration_id(iteration))


def measure_evaluation(place: Workplace, iteration: int, name: str) -> Measures:
    """Return the measures of the stored episodes of an evaluation; empty if there are none. Gains
    are over models whose evaluations are finished.
    """
    own = counted_episodes(place, evaluation_id(place, iteration, name))
    base = ended_episodes(place, evaluation_id(place, 0, name)) if iteration else []
    previous = ended_episodes(place, evaluation_id(place, iteration - 1, name)) if iteration > 1 else []

    def measured(episodes: Sequence[Episode]) -> Measures:
        found = measure(
            episodes,
            base=base,
            previous=previous,
            disaster_counts=place.recipe.evaluation.disaster_counts,
            voiced=place.method.voiced,
        )
        found |= place.method.measures(place, iteration, name, episodes)
        return found if name != REVISION else {key: found[key] for key in OF_REVISION if key in found}

    # A further set belongs to one world.
    several = place.recipe.environments and name not in place.recipe.evaluation.sets
    return measure_worlds(own, measured) if several else measured(own)


def _measure_later(place: Workplace, iteration: int, names: Collection[str]) -> None:
    """Measure the finished evaluations of later iterations again: their gains are relative to this
    one.
    """
    with snapshot(place.store) as state:
        now = dataclasses.replace(place, store=state)
        later = [one for one in finished_evaluations(state, place.run_id, after=iteration) if one.name in names]
        rows = [measure_rows(one.evaluation_id, measure_evaluation(now, one.iteration, one.name)) for one in later]
    if rows:
        place.store.write(merge(rows))
