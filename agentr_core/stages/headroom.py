"""Headroom: sampled episodes of some training and held-out instances, and a forecast of what an
iteration would yield with the model that a run begins with.

They are evaluations of iteration 0, so they resume, are measured and are queried in SQL like all
others; a call for more episodes or instances goes on from the stored ones. Nothing is trained on
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentr_core.errors import ConfigError, DataFault
from agentr_core.evaluation.episodes import episode_plans
from agentr_core.evaluation.metrics import Headroom, InstanceResults, Judge, Prospect, pass_rates
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.environments import TEST as EVERY_TEST
from agentr_core.runtime.instances import foreseen_instances, held_out
from agentr_core.runtime.place import Acting, Method, Workplace
from agentr_core.stages.evaluate import (
    Measures,
    Series,
    by_instance,
    counted_episodes,
    keep_measures,
    measure,
    measure_rows,
    play_evaluations,
)
from agentr_core.store.codec.trajectories import Episode
from agentr_core.types import NO_LIMITS, Instance

STAGE = "headroom"
VERSION = 1
TRAIN, TEST = "headroom-train", "headroom-test"
GREEDY = "-greedy"
"""The suffix of the names of evaluations that play one greedy episode per instance."""
OF_FORECASTS = "forecast/"
OF_JUDGES = "judge/"
"""The prefixes of metrics of the training instances that are forecasts, and measures of judges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomReport:
    """The measures by evaluation, the prospects of the methods, and the results of the judges.

    `instances` is the number of training instances from which a first iteration collects,
    `episodes` the number sampled for each.
    """

    measures: dict[str, Measures]
    prospects: tuple[Prospect, ...]
    judges: tuple[Judge, ...]
    instances: int
    episodes: int


async def headroom(
    place: Workplace,
    methods: Sequence[Method],
    *,
    episodes: int,
    instances: int,
    judged: int = 0,
    judges: Sequence[Path] = (),
) -> HeadroomReport:
    """Sample the missing episodes, `episodes` for each of `instances` training and as many held-out
    instances, and return what they show, and the prospects of `methods`; 0 instances means all.

    The recipe's judge, and each model of `judges` in its place, is asked about at most `judged` of
    the sampled episodes that were lost.

    Raises:
        ConfigError: too few episodes, or the recipe collects greedily.
        DataFault: training and held-out instances overlap, or no training instance could be played.
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
    """
    acting = place.method.acting(place.recipe)
    if place.recipe.environments:
        raise ConfigError("headroom: the recipe has several worlds; keep one of them, written as `environment`")
    if acting.sampling.temperature == 0:
        raise ConfigError(
            "headroom: the recipe collects at temperature 0, where all episodes of an instance are the same"
        )
    if episodes < 2:
        raise ConfigError("headroom: one episode of an instance shows no contrast; sample at least 2")
    chosen = await foreseen_instances(place, 1)
    train, test, has_expert = _choose(place, chosen, instances)
    series = [*_series(place, TRAIN, train, episodes, acting), *_series(place, TEST, test, episodes, acting)]
    await play_evaluations(place, 0, series)
    by_set: dict[str, list[Episode]] = {}
    for evaluation in series:
        # Episodes that an interrupted call for more left behind are excluded: wins finish first, so
        # they would be overrepresented.
        plan_keys = {(plan.instance.key, plan.number) for plan in evaluation.plans}
        set_episodes = counted_episodes(place, evaluation.evaluation_id)
        by_set[evaluation.name] = [e for e in set_episodes if (e.instance.key, e.repeat) in plan_keys]
    measures = {
        evaluation.name: measure(
            by_set[evaluation.name],
            disaster_counts=place.recipe.evaluation.disaster_counts,
            voiced=place.method.voiced,
        )
        for evaluation in series
    }
    keep_measures(place, 0, [(evaluation, measures[evaluation.name]) for evaluation in series])
    experience = _summary(by_set[TRAIN], by_set[TRAIN + GREEDY], instances=len(chosen), has_expert=has_expert)
    prospects = tuple(method.prospect(place.recipe, experience) for method in methods if method.prospect)
    forecasts = {
        OF_FORECASTS + forecast.name: forecast.expected for prospect in prospects for forecast in prospect.forecasts
    }
    place.store.write(measure_rows(series[0].evaluation_id, forecasts))
    lost_episodes = _lost(by_set[TRAIN], judged, place.recipe.seed)
    judge_records = await place.method.trial(place, lost_episodes, judges) if place.method.trial else ()
    of_judges = {
        f"{OF_JUDGES}{judge.name}/{judge.votes}/{name}": getattr(judge, name)
        for judge in judge_records
        for name in ("read", "right", "bad", "bad_is_right", "bad_is_seen", "first_error")
        if getattr(judge, name).n
    }
    place.store.write(measure_rows(series[0].evaluation_id, of_judges))
    return HeadroomReport(
        measures=measures, prospects=prospects, judges=judge_records, instances=len(chosen), episodes=episodes
    )


def _lost(episodes: Sequence[Episode], number: int, seed: int) -> list[Episode]:
    """Return at most `number` failed episodes, spread over as many instances as possible. A smaller
    `number` gives the beginning of the same list.
    """
    ways: dict[str, list[Episode]] = {}
    for episode in sorted(
        episodes, key=lambda episode: derive_seed(seed, STAGE, "lost", episode.instance.key, episode.repeat)
    ):
        if not episode.trajectory.success:
            ways.setdefault(episode.instance.key, []).append(episode)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ways.values()))
    return [episode for episode in turns if episode is not None][:number]


def _choose(place: Workplace, chosen: Sequence[Instance], number: int) -> tuple[list[Instance], list[Instance], bool]:
    """Return training and held-out instances, at most `number` of each (0: all), and whether the
    first training instance has an expert. A smaller `number` gives the beginning of the same lists.
    """
    train, test = (
        sorted(instances, key=lambda instance: derive_seed(place.recipe.seed, STAGE, instance.key))[: number or None]
        for instances in (chosen, held_out(place)[EVERY_TEST])
    )
    with place.worlds() as worlds:
        return train, test, bool(train) and worlds.of(train[0]).expert(train[0]) is not None


def _series(
    place: Workplace, name: str, instances: Sequence[Instance], episodes: int, acting: Acting
) -> tuple[Series, Series]:
    """Return the sampled and the greedy episodes of a set: training instances are played within the
    limits of a collection, held-out ones within those of an evaluation.
    """
    evaluation = place.recipe.evaluation
    held_out = name == TEST
    tokens = evaluation.max_new_tokens if held_out else acting.sampling.max_new_tokens
    defaults = replace(acting.sampling, max_new_tokens=tokens)
    steps = evaluation.max_steps if held_out else acting.max_steps
    limits = evaluation.limits if held_out else acting.limits
    seed = derive_seed(place.recipe.seed, STAGE, name)

    def series(name: str, number: int, temperature: float, repeats: int) -> Series:
        sampling = replace(defaults, temperature=temperature)
        config = {"sampling": sampling, "max_steps": steps, "repeats": repeats}
        if limits != NO_LIMITS:
            config |= {"limits": limits}
        return Series(
            evaluation_id=fingerprint(STAGE, VERSION, place.iteration_id(0), name, config),
            name=name,
            split=place.recipe.instances.test if held_out else place.recipe.instances.train,
            plans=episode_plans(instances, episodes=number, seed=seed),
            sampling=sampling,
            max_steps=steps,
            repeats=repeats,
            limits=limits,
            config=config,
        )

    max_repeats = evaluation.repeats if held_out else acting.repeats
    return series(name, episodes, defaults.temperature, max_repeats), series(name + GREEDY, 1, 0.0, evaluation.repeats)


def _summary(episodes: Sequence[Episode], greedy: Sequence[Episode], *, instances: int, has_expert: bool) -> Headroom:
    """Return the pass rates of training instances, for a forecast; those with fewer than two
    episodes are left out. Raises `DataFault` if no instance has two.
    """
    won_keys = {e.instance.key for e in greedy if e.trajectory.success}
    groups = [group for group in by_instance(sorted(episodes, key=lambda e: e.instance.key)) if len(group) > 1]
    results = [
        InstanceResults(
            key=group[0].instance.key,
            origin=group[0].origin,
            depth=group[0].depth,
            episodes=len(group),
            wins=sum(e.trajectory.success for e in group),
            greedy=group[0].instance.key in won_keys,
        )
        for group in groups
    ]
    if not results:
        raise DataFault("no training instance was played twice, so nothing can be said; table event has the errors")
    return Headroom(rates=pass_rates(results), instances=instances, has_expert=has_expert)
