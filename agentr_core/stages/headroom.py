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
from agentr_core.evaluation.metrics import Headroom, InstanceResults, Judge, Prospect, estimate_pass_rates
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.environments import TEST as EVERY_TEST
from agentr_core.runtime.context import Method, RolloutConfig, RunContext
from agentr_core.runtime.instances import held_out_by_set, planned_instances
from agentr_core.stages.evaluate import (
    Measures,
    Series,
    by_instance,
    counted_episodes,
    measure,
    measure_rows,
    play_evaluations,
    store_measures,
)
from agentr_core.store.codec.trajectories import Episode
from agentr_core.types import NO_LIMITS, Instance

STAGE = "headroom"
VERSION = 1
TRAIN, TEST = "headroom-train", "headroom-test"
GREEDY_SUFFIX = "-greedy"
"""The suffix of the names of evaluations that play one greedy episode per instance."""
FORECAST_PREFIX = "forecast/"
JUDGE_PREFIX = "judge/"
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
    ctx: RunContext,
    methods: Sequence[Method],
    *,
    episodes: int,
    instances: int,
    max_judged: int = 0,
    judges: Sequence[Path] = (),
) -> HeadroomReport:
    """Sample the missing episodes, `episodes` for each of `instances` training and as many held-out
    instances, and return what they show, and the prospects of `methods`; 0 instances means all.

    The recipe's judge, and each model of `judges` in its place, is asked about at most `max_judged`
    of the sampled episodes that were lost.

    Raises:
        ConfigError: too few episodes, or the recipe collects greedily.
        DataFault: training and held-out instances overlap, or no training instance could be played.
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
    """
    config = ctx.method.rollout_config(ctx.recipe)
    if ctx.recipe.environments:
        raise ConfigError("headroom: the recipe has several worlds; keep one of them, written as `environment`")
    if config.sampling.temperature == 0:
        raise ConfigError(
            "headroom: the recipe collects at temperature 0, where all episodes of an instance are the same"
        )
    if episodes < 2:
        raise ConfigError("headroom: one episode of an instance shows no contrast; sample at least 2")
    candidates = await planned_instances(ctx, 1)
    train, test, has_expert = _choose_instances(ctx, candidates, instances)
    series = [*_set_series(ctx, TRAIN, train, episodes, config), *_set_series(ctx, TEST, test, episodes, config)]
    await play_evaluations(ctx, 0, series)
    by_set: dict[str, list[Episode]] = {}
    for evaluation in series:
        # Episodes that an interrupted call for more left behind are excluded: wins finish first, so
        # they would be overrepresented.
        plan_keys = {(plan.instance.key, plan.number) for plan in evaluation.plans}
        set_episodes = counted_episodes(ctx, evaluation.evaluation_id)
        by_set[evaluation.name] = [e for e in set_episodes if (e.instance.key, e.repeat) in plan_keys]
    measures = {
        evaluation.name: measure(
            by_set[evaluation.name],
            disaster_counts=ctx.recipe.evaluation.disaster_counts,
            has_reflection=ctx.method.has_reflection,
        )
        for evaluation in series
    }
    store_measures(ctx, 0, [(evaluation, measures[evaluation.name]) for evaluation in series])
    experience = _summary_of(
        by_set[TRAIN], by_set[TRAIN + GREEDY_SUFFIX], instances=len(candidates), has_expert=has_expert
    )
    prospects = tuple(method.prospect(ctx.recipe, experience) for method in methods if method.prospect)
    forecasts = {
        FORECAST_PREFIX + forecast.name: forecast.expected for prospect in prospects for forecast in prospect.forecasts
    }
    ctx.store.write(measure_rows(series[0].evaluation_id, forecasts))
    lost_episodes = _choose_lost_episodes(by_set[TRAIN], max_judged, ctx.recipe.seed)
    judge_records = await ctx.method.measure_judges(ctx, lost_episodes, judges) if ctx.method.measure_judges else ()
    judge_measures = {
        f"{JUDGE_PREFIX}{judge.name}/{judge.votes}/{name}": getattr(judge, name)
        for judge in judge_records
        for name in ("read", "right", "bad", "bad_is_right", "bad_is_seen", "first_error")
        if getattr(judge, name).n
    }
    ctx.store.write(measure_rows(series[0].evaluation_id, judge_measures))
    return HeadroomReport(
        measures=measures, prospects=prospects, judges=judge_records, instances=len(candidates), episodes=episodes
    )


def _choose_lost_episodes(episodes: Sequence[Episode], max_episodes: int, seed: int) -> list[Episode]:
    """Return at most `max_episodes` failed episodes, spread over as many instances as possible. A
    smaller `max_episodes` gives the beginning of the same list.
    """
    lost_by_instance: dict[str, list[Episode]] = {}
    for episode in sorted(
        episodes, key=lambda episode: derive_seed(seed, STAGE, "lost", episode.instance.key, episode.repeat)
    ):
        if not episode.trajectory.success:
            lost_by_instance.setdefault(episode.instance.key, []).append(episode)
    interleaved = itertools.chain.from_iterable(itertools.zip_longest(*lost_by_instance.values()))
    return [episode for episode in interleaved if episode is not None][:max_episodes]


def _choose_instances(
    ctx: RunContext, candidates: Sequence[Instance], max_instances: int
) -> tuple[list[Instance], list[Instance], bool]:
    """Return training and held-out instances, at most `max_instances` of each (0: all), and whether
    the first training instance has an expert. A smaller `max_instances` gives the beginning of the
    same lists.
    """
    train, test = (
        sorted(instances, key=lambda instance: derive_seed(ctx.recipe.seed, STAGE, instance.key))[
            : max_instances or None
        ]
        for instances in (candidates, held_out_by_set(ctx)[EVERY_TEST])
    )
    with ctx.worlds() as worlds:
        return train, test, bool(train) and worlds.env_of(train[0]).expert(train[0]) is not None


def _set_series(
    ctx: RunContext, name: str, instances: Sequence[Instance], episodes: int, rollout_config: RolloutConfig
) -> tuple[Series, Series]:
    """Return the sampled and the greedy episodes of a set: training instances are played within the
    limits of a collection, held-out ones within those of an evaluation.
    """
    evaluation = ctx.recipe.evaluation
    is_held_out = name == TEST
    tokens = evaluation.max_new_tokens if is_held_out else rollout_config.sampling.max_new_tokens
    defaults = replace(rollout_config.sampling, max_new_tokens=tokens)
    steps = evaluation.max_steps if is_held_out else rollout_config.max_steps
    limits = evaluation.limits if is_held_out else rollout_config.limits
    seed = derive_seed(ctx.recipe.seed, STAGE, name)

    def series(name: str, number: int, temperature: float, repeats: int) -> Series:
        sampling = replace(defaults, temperature=temperature)
        config = {"sampling": sampling, "max_steps": steps, "repeats": repeats}
        if limits != NO_LIMITS:
            config |= {"limits": limits}
        return Series(
            evaluation_id=fingerprint(STAGE, VERSION, ctx.iteration_id(0), name, config),
            name=name,
            split=ctx.recipe.instances.test if is_held_out else ctx.recipe.instances.train,
            plans=episode_plans(instances, episodes=number, seed=seed),
            sampling=sampling,
            max_steps=steps,
            repeats=repeats,
            limits=limits,
            config=config,
        )

    max_repeats = evaluation.repeats if is_held_out else rollout_config.repeats
    return series(name, episodes, defaults.temperature, max_repeats), series(
        name + GREEDY_SUFFIX, 1, 0.0, evaluation.repeats
    )


def _summary_of(
    episodes: Sequence[Episode], greedy: Sequence[Episode], *, instances: int, has_expert: bool
) -> Headroom:
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
    return Headroom(rates=estimate_pass_rates(results), instances=instances, has_expert=has_expert)
