"""Differences between the arms of a comparison, paired by held-out episode over all seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.reports.comparison import Difference
from agentr_core.reports.records import Estimate
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.lost_episodes import ended_episodes
from agentr_core.stages.measures import gains, mean_gain
from agentr_core.stages.report_scores import finite
from agentr_core.store.codec.trajectories import Episode

EpisodesBySet = Mapping[str, Sequence[Episode]]
"""The held-out episodes of a model, by set."""


def episodes_by_set(place: Workplace, iteration: int) -> EpisodesBySet:
    """Return the held-out episodes of an iteration's model, by set; of finished evaluations
    alone.
    """
    names = (TEST, *place.recipe.evaluation.sets, REVISION)
    found = {name: ended_episodes(place, evaluation_id(place, iteration, name)) for name in names}
    return {name: episodes for name, episodes in found.items() if episodes}


def differences(models: Mapping[str, Mapping[int, EpisodesBySet]]) -> tuple[Difference, ...]:
    """Return the difference in success between every two models on each set.

    Args:
        models: the episodes that each model played, by name and seed. Only seeds and episodes that
            two models share count.
    """
    names = list(models)
    found = [
        Difference(arm=name, other=other, sets=_by_set(models[name], models[other]))
        for number, name in enumerate(names)
        for other in names[:number]
    ]
    return tuple(one for one in found if one.sets)


def _by_set(now: Mapping[int, EpisodesBySet], before: Mapping[int, EpisodesBySet]) -> dict[str, Estimate]:
    seeds = [seed for seed in now if seed in before]
    found: dict[str, Estimate] = {}
    for name in dict.fromkeys(name for seed in seeds for name in now[seed]):
        pairs = [pair for seed in seeds for pair in gains(now[seed].get(name, ()), before[seed].get(name, ()))]
        # An instance that several seeds played is one cluster: its episodes are not independent
        # evidence.
        estimate = finite(mean_gain(pairs))
        if estimate is not None:
            found[name] = estimate
    return found
