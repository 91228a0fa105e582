"""Means over seeds: the runs of a store whose recipes differ in nothing but the seed, together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple

from agentr_core.evaluation.metrics import mean_over_seeds
from agentr_core.recipes.models import mask_secrets
from agentr_core.recipes.recipe import Recipe, resolved
from agentr_core.reports.comparison import GroupMean, SeedMean
from agentr_core.store.database import Store
from agentr_core.store.queries.evaluations import evaluation_scores

SECTIONS_WITHOUT_EFFECT: Final = ("name", "description", "workspace", "alarms", "scale")
"""The sections of a recipe that change no result."""
_MAY_DIFFER: Final = (*SECTIONS_WITHOUT_EFFECT, "seed", "iterations")
"""Those, and the sections in which the runs of a group may differ; how many iterations each did
shows in its rows.
"""
_MAX_SETTINGS: Final = 4
"""How many settings name a group; runs of different recipes may differ in dozens."""


class SeedGroup(NamedTuple):
    """Runs whose recipes differ in the seed only."""

    name: str
    """The settings in which the group differs from the others; the name of its recipe if there are
    none.
    """
    runs: Mapping[int, str]
    """The ids of the runs by their seeds; of several with one seed, the last."""


def seed_groups(recipes: Mapping[str, Recipe]) -> list[SeedGroup]:
    """Return the groups of runs, in the order of their first runs.

    Args:
        recipes: the recipes by run, the oldest run first.
    """
    groups: dict[str, dict[int, str]] = {}
    settings: dict[str, dict[str, str]] = {}
    for run_id, recipe in recipes.items():
        config = {name: value for name, value in resolved(recipe).items() if name not in _MAY_DIFFER}
        key = json.dumps(config, sort_keys=True)
        groups.setdefault(key, {})[recipe.seed] = run_id
        settings.setdefault(key, dict(_leaves(mask_secrets(config))))
    names = dict.fromkeys(name for fields in settings.values() for name in fields)
    differing = [name for name in names if len({fields.get(name, "") for fields in settings.values()}) > 1]
    named_groups = []
    for key, runs in groups.items():
        first = next(iter(runs.values()))
        parts = [f"{name}={settings[key][name]}" for name in differing if name in settings[key]]
        if len(parts) > _MAX_SETTINGS:
            # The settings that are left out may be those that tell it from another group.
            parts = [*parts[:_MAX_SETTINGS], f"and {len(parts) - _MAX_SETTINGS} more, as run {first[:8]}"]
        named_groups.append(SeedGroup(", ".join(parts) or recipes[first].name, runs))
    return named_groups


def means_over_seeds(store: Store, recipes: Mapping[str, Recipe]) -> list[GroupMean]:
    """Return the mean success and reward of each group of runs on each set after each iteration,
    and its success minus that of the first group, paired by seed. Only finished evaluations count.
    The test set comes first, then the others by name.

    Args:
        recipes: as for `seed_groups`.
    """
    groups = seed_groups(recipes)
    means = []
    scores = evaluation_scores(store, list(recipes))
    for (name, iteration), members in groupby(scores, key=lambda score: (score.name, score.iteration)):
        scores_by_run = {score.run_id: score for score in members}
        first_by_seed: dict[int, float] = {}
        for number, group in enumerate(groups):
            runs = {seed: run for seed, run in sorted(group.runs.items()) if run in scores_by_run}
            success = {seed: scores_by_run[run].success for seed, run in runs.items()}
            if number == 0:
                first_by_seed = success
            if not runs:
                continue
            differences = [share - first_by_seed[seed] for seed, share in success.items() if seed in first_by_seed]
            means.append(
                GroupMean(
                    group=group.name,
                    name=name,
                    iteration=iteration,
                    success=seed_mean(success.values(), 0, 1),
                    reward=seed_mean((scores_by_run[run].reward for run in runs.values()), -math.inf, 1),
                    versus_first=seed_mean(differences, -1, 1) if number else None,
                    runs=runs,
                )
            )
    return means


def seed_mean(values: Iterable[float], lower_bound: float, upper_bound: float) -> SeedMean | None:
    """Return the mean over seeds with Student's 95% t interval, clipped to [`lower_bound`,
    `upper_bound`]; without an interval for a single value, and None without values.
    """
    estimate = mean_over_seeds(list(values))
    if not estimate.n:
        return None
    if estimate.n == 1:
        return SeedMean(value=estimate.mean, low=None, high=None, n=1)
    return SeedMean(
        value=estimate.mean, low=max(lower_bound, estimate.low), high=min(upper_bound, estimate.high), n=estimate.n
    )


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """Yield the leaves of plain data: their dotted names, with their values as text."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}".removeprefix("."))
    else:
        yield name, value if value and isinstance(value, str) else json.dumps(value)
