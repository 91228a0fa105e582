"""Evaluation of a checkpoint: the held-out instances, and recovery from the base model's
failures.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentr_core.evaluation.episodes import EpisodePlan, episode_plans
from agentr_core.evaluation.metrics import (
    Estimate,
    clustered_share,
    counted_reward,
    mean_reward,
    pass_at,
    powers_of_two,
    success_rate,
)
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.runtime.episode_shard import EpisodeShard, EpisodeShards
from agentr_core.runtime.instances import set_instances, stored_rows, test_instances
from agentr_core.runtime.place import Checkpoint, Workplace
from agentr_core.stages.lost_episodes import counted_episodes, lost_rows
from agentr_core.stages.revision_states import revision_states
from agentr_core.store.codec import evaluation_rows, load_episodes, metric_rows
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Sampling

STAGE = "evaluate"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The episodes of one evaluation of a checkpoint."""

    name: str
    split: str
    plans: tuple[EpisodePlan, ...]
    temperature: float
    max_steps: int


def evaluation_id(place: Workplace, iteration: int, name: str) -> str:
    """Return the id of an evaluation of the checkpoint that an iteration made (0: the base
    model).
    """
    recipe = place.recipe
    iteration_id = place.iteration_id(iteration) if iteration else place.source_id(0)
    # A further set changes nothing about the others.
    alone = dataclasses.replace(recipe.evaluation, sets={})  # type: ignore[type-var]
    further = [recipe.evaluation.sets[name]] if name in recipe.evaluation.sets else []
    return fingerprint("evaluation", VERSION, iteration_id, name, alone, recipe.instances, *further)


async def evaluate(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play what is missing of the evaluations of an iteration's checkpoint; return the success of
    each.

    The revision test continues failed episodes of the base model.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: the checkpoint is not there, or iteration 0 was not evaluated before.
    """
    series = _from_the_beginning(place, iteration)
    if not place.recipe.evaluation.revision_test.enabled:
        return await _play(place, iteration, series)
    if iteration == 0:
        scores = await _play(place, iteration, series)
        return scores | await _play(place, iteration, [_revision(place)])
    return await _play(place, iteration, [*series, _revision(place)])


def _from_the_beginning(place: Workplace, iteration: int) -> list[Series]:
    """Return the evaluations that an iteration's checkpoint plays, but for the revision test."""
    recipe, config = place.recipe, place.recipe.evaluation
    further = {name: chosen for name, chosen in config.sets.items() if chosen.models == "all" or iteration == 0}
    env = place.make_environment()
    try:
        instances = test_instances(recipe, env)
        others = {name: set_instances(chosen, env) for name, chosen in further.items()}
        played = dict.fromkeys(itertools.chain(instances, *others.values()))
        place.store.write({"instance": stored_rows(env, played)})
    finally:
        env.close()
    seed = derive_seed(recipe.seed, "evaluate", iteration)
    series = [
        Series(
            name=TEST,
            split=recipe.instances.test,
            plans=episode_plans(instances, episodes=config.episodes, seed=seed),
            temperature=config.temperature,
            max_steps=config.max_steps,
        )
    ]
    series += [
        Series(
            name=name,
            split=chosen.split,
            plans=episode_plans(others[name], episodes=chosen.episodes, seed=derive_seed(seed, name)),
            temperature=chosen.temperature,
            max_steps=config.max_steps,
        )
        for name, chosen in further.items()
    ]
    return series


def _revision(place: Workplace) -> Series:
    """Return the revision test: episodes that go on from failed prefixes of the base model."""
    config = place.recipe.evaluation
    return Series(
        name=REVISION,
        split=place.recipe.instances.test,
        plans=revision_states(place, evaluation_id(place, 0, TEST)),
        temperature=config.temperature,
        max_steps=config.revision_test.max_steps,
    )


async def _play(place: Workplace, iteration: int, series: Sequence[Series]) -> dict[str, Any]:
    """Play what is missing of some evaluations together; return the success of each by its name."""
    checkpoint = place.trained(iteration)
    for one in series:
        place.store.write(_head(place, iteration, one, checkpoint, finished=False))
    shards = tuple(shard for one in series if len(shard := _missing(place, iteration, one, checkpoint)))
    if shards:
        names = ", ".join(shard.name for shard in shards)
        work = EpisodeShards(parts=shards)
        await place.work_through(work, f"{STAGE} {names}", iteration, f"episodes of {names}")
    scores = {}
    for one in series:
        key = evaluation_id(place, iteration, one.name)
        lost = lost_rows(key, one.plans, load_episodes(place.store, key), iteration_id=place.iteration_id(iteration))
        place.store.write(lost)
        counted = counted_episodes(place, key)
        numbers = []
        if one.name != REVISION:
            disasters = place.recipe.evaluation.disaster_counts
            numbers = sampled_metrics(key, counted, disaster_counts=disasters)
        place.store.write(merge([_head(place, iteration, one, checkpoint, finished=True), *numbers]))
        successes = [episode.trajectory.success for episode in counted]
        scores[one.name] = asdict(success_rate(successes)) if successes else {"n": 0}
    return scores


def _head(place: Workplace, iteration: int, one: Series, checkpoint: Checkpoint, *, finished: bool) -> Rows:
    config = place.recipe.evaluation
    return evaluation_rows(
        evaluation_id(place, iteration, one.name),
        iteration_id=place.iteration_id(iteration),
        checkpoint_id=checkpoint.id,
        name=one.name,
        split=one.split,
        config=config.sets.get(one.name, config),
        finished=finished,
    )


def _missing(place: Workplace, iteration: int, one: Series, checkpoint: Checkpoint) -> EpisodeShard:
    """Return the episodes of an evaluation that are not stored yet."""
    config = place.recipe.evaluation
    key = evaluation_id(place, iteration, one.name)
    done = {(e.instance.key, e.repeat, e.cut) for e in load_episodes(place.store, key)}
    return EpisodeShard(
        stage=STAGE,
        evaluation_id=key,
        name=one.name,
        iteration=iteration,
        checkpoint=checkpoint,
        plans=tuple(p for p in one.plans if (p.instance.key, p.number, len(p.prefix)) not in done),
        sampling=Sampling(temperature=one.temperature, max_new_tokens=config.max_new_tokens),
        max_steps=one.max_steps,
        repeats=config.repeats,
        done=len(done),
        total=len(one.plans),
    )


def sampled_metrics(key: str, played: Sequence[Episode], *, disaster_counts: float = 0.0) -> list[Rows]:
    """Return what several episodes of each instance show, as metrics: pass@k, and success and
    reward of the best.

    pass@k is the chance that one of k episodes succeeds, for k = 1, 2, 4, ... Who picks the best
    one has looked at the environment's reward: a bound, and a baseline of the ETO paper.
    """
    by_instance: dict[str, list[Episode]] = {}
    for episode in played:
        by_instance.setdefault(episode.instance.key, []).append(episode)
    most = max(map(len, by_instance.values()), default=0)
    if most < 2:
        return []
    groups = list(by_instance.values())
    success = success_rate([any(e.trajectory.success for e in episodes) for episodes in groups])
    reward = mean_reward([max(counted_reward(e.trajectory, disaster_counts) for e in some) for some in groups])
    found = {f"best_of_{most}_success": success, f"best_of_{most}_reward": reward}
    found |= {f"pass@{k}": pass_at_k(groups, k) for k in powers_of_two(most)}
    return [
        metric_rows("evaluation", key, name, e.mean, low=_number(e.low), high=_number(e.high), n=e.n)
        for name, e in found.items()
    ]


def pass_at_k(groups: Iterable[Sequence[Episode]], k: int) -> Estimate:
    """Return pass@k over groups of episodes of one instance each; groups of fewer than k are left
    out.
    """
    counted = [group for group in groups if len(group) >= k]
    return clustered_share(
        [pass_at(k, len(group), sum(e.trajectory.success for e in group)) for group in counted],
        [group[0].origin for group in counted],
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
