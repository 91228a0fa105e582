"""The report of a comparison, filled from the store alone: every arm and seed of its recipe that
was evaluated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import yaml

from agentr_core.evaluation.metrics import over_seeds
from agentr_core.fingerprint import canonical
from agentr_core.methods.comparison.arms import RUNS, Arm, arms_of
from agentr_core.recipes import parse, shown
from agentr_core.recipes.evaluation import TEST
from agentr_core.reports import wording
from agentr_core.reports.comparison import ArmReport, ArmRun, ComparisonReport, SeedMean
from agentr_core.reports.records import IterationScore
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.start import asked_for
from agentr_core.stages.report_scores import Scoreboard
from agentr_core.store.queries.iterations import checkpoint_made, trained_by, trained_iterations, training_made
from agentr_core.store.queries.runs import configs_of_all, configs_on_pool, run_state
from agentr_core.store.queries.usage import experience_tokens

BASE, TRAINED = 0, 1
"""The iterations of an arm on a pool: the model that all arms begin with, and the one it made."""


def build_comparison(place: Workplace) -> ComparisonReport:
    """Return the report of the comparison whose run a workplace is of; arms may still be without
    runs.
    """
    recipe = place.recipe
    by_name: dict[str, list[ArmRun]] = {name: [] for name in recipe.compare.arms}
    arms = arms_of(recipe, place.run_id)
    uses = {arm.name: arm.recipe.method if arm.whole else arm.recipe.data.use for arm in arms}
    made_of = _trainings(place)
    base = None if recipe.method == RUNS else Scoreboard(place).score(BASE)
    for arm in arms:
        run_id = made_of.get(canonical(asked_for(arm.recipe)))
        if run_id is None:
            continue
        here = replace(place, recipe=arm.recipe, run_id=run_id)
        board = Scoreboard(here)
        made = _run(here, board, arm, recipe.compare.metrics)
        by_name[arm.name] += [made] if made else []
        # Whole runs evaluate what they begin with themselves, and all begin with the same model.
        base = base or (board.score(BASE) if arm.whole else None)
    first = {run.seed: run.score.success.value for run in next(iter(by_name.values()))}
    return ComparisonReport(
        recipe_name=recipe.name,
        run_id=place.run_id,
        date=_date(place),
        environment=", ".join(recipe.world_names),
        model=recipe.model.label,
        max_tokens=0 if recipe.method == RUNS else recipe.training.max_tokens,
        max_seconds=0.0 if recipe.method == RUNS else recipe.training.max_seconds,
        seeds=recipe.compare.seeds,
        metrics=recipe.compare.metrics,
        base=base,
        arms=tuple(_arm(name, uses[name], runs, first) for name, runs in by_name.items()),
        recipe_yaml=yaml.safe_dump(shown(recipe), sort_keys=False),
    )


def _arm(name: str, trains_on: str, runs: list[ArmRun], first: dict[int, float]) -> ArmReport:
    found = [run.score for run in runs]
    measured = dict.fromkeys(name for run in runs for name in run.metrics)
    return ArmReport(
        name=name,
        trains_on=trains_on,
        runs=tuple(runs),
        success=_mean((score.success.value for score in found), 0, 1),
        reward=_mean((score.reward.value for score in found), 0, 1),
        steps=_mean((score.steps_to_success for score in found if score.steps_to_success is not None), 0, math.inf),
        revision=_mean((score.revision.value for score in found if score.revision), 0, 1),
        against=_mean((run.score.success.value - first[run.seed] for run in runs if run.seed in first), -1, 1),
        metrics={
            metric: _mean((run.metrics[metric] for run in runs if metric in run.metrics), -math.inf, math.inf)
            for metric in measured
        },
    )


def _mean(values: Iterable[float], least: float, most: float) -> SeedMean | None:
    """Return the mean over seeds with its interval, which ends where the values themselves must
    end.
    """
    estimate = over_seeds(list(values))
    if not estimate.n:
        return None
    if estimate.n == 1:
        return SeedMean(value=estimate.mean, low=None, high=None, n=1)
    return SeedMean(value=estimate.mean, low=max(least, estimate.low), high=min(most, estimate.high), n=estimate.n)


def _trainings(place: Workplace) -> dict[str, str]:
    """Return the runs that may be those of arms by what they ask for; of several that ask the same,
    the last one.

    Their ids are not computed again: a recipe of an earlier version has fewer fields, and so
    another id.
    """
    whole = place.recipe.method == RUNS
    configs = configs_of_all(place.store) if whole else configs_on_pool(place.store, place.run_id)
    return {canonical(asked_for(parse(json.loads(config), stored=True))): run_id for run_id, config in configs.items()}


def _run(here: Workplace, board: Scoreboard, arm: Arm, metrics: Sequence[str]) -> ArmRun | None:
    """Return what is known of the run of an arm, once its last model was evaluated."""
    last = max(trained_iterations(here.store, here.run_id), default=0) if arm.whole else TRAINED
    score = board.score(last) if last else None
    if score is None or (arm.whole and last < arm.recipe.iterations):
        return None
    told = {metric: _measured(board, last, metric) for metric in metrics}
    known = {metric: value for metric, value in told.items() if value is not None}
    if arm.whole:
        return _whole_run(here, arm, last, score, known)
    made = training_made(here.store, here.iteration_id(TRAINED))
    if made is None:
        return None
    return ArmRun(
        seed=arm.seed,
        run_id=here.run_id,
        checkpoint_id=made.checkpoint_id,
        dataset_hash=made.dataset_hash,
        rows=made.counts["rows"],
        trained_tokens=made.trained_tokens,
        passes=made.trained_tokens / sum(made.counts["trained_tokens"].values()),
        seconds=made.seconds,
        score=score,
        metrics=known,
    )


def _whole_run(here: Workplace, arm: Arm, last: int, score: IterationScore, metrics: dict[str, float]) -> ArmRun | None:
    checkpoint = checkpoint_made(here.store, here.iteration_id(last))
    if checkpoint is None:
        return None
    tokens, seconds = trained_by(here.store, here.run_id)
    return ArmRun(
        seed=arm.seed,
        run_id=here.run_id,
        checkpoint_id=checkpoint.checkpoint_id,
        dataset_hash=checkpoint.dataset_hash or "",
        trained_tokens=tokens,
        sampled_tokens=experience_tokens(here.store, here.run_id),
        seconds=seconds,
        score=score,
        metrics=metrics,
    )


def _measured(board: Scoreboard, iteration: int, metric: str) -> float | None:
    """Return a measure of an iteration's model, of another set than the first as `set:name`."""
    held_out, _, name = metric.rpartition(":")
    found = board.measured(iteration, held_out or TEST).get(name)
    return None if found is None else found.mean


def _date(place: Workplace) -> str:
    state = run_state(place.store, place.run_id)
    ended = state.finished_at if state else None
    return wording.moment(ended or datetime.now(UTC))
