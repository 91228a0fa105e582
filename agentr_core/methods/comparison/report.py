"""The report of a comparison, made from the store alone, with every arm and seed of its recipe that
was evaluated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import yaml

from agentr_core.fingerprint import canonical
from agentr_core.methods.comparison import OF_SAMPLES, RUNS, Arm, arms_of, stages_for
from agentr_core.methods.table import method_of
from agentr_core.recipes.environments import REVISION, TEST
from agentr_core.recipes.parsing import restored
from agentr_core.recipes.recipe import for_display
from agentr_core.reports import wording
from agentr_core.reports.comparison import BASE, ArmReport, ArmRun, ComparisonReport, Difference
from agentr_core.reports.document import Estimate
from agentr_core.runtime.place import Stage, Workplace
from agentr_core.runtime.start import asked_for
from agentr_core.stages.evaluate import ended_episodes, evaluation_id, gains, mean_gain
from agentr_core.stages.means import seed_mean
from agentr_core.stages.report import Scoreboard, finite, promoted
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.queries.runs import (
    checkpoint_made,
    configs_of_all,
    configs_on_pool,
    experience_tokens,
    run_state,
    spliced_anew,
    trained_by,
    trained_iterations,
    training_made,
    uses_of_pool,
)

# Differences between the arms of a comparison, paired by held-out episode over all seeds.

EpisodesBySet = Mapping[str, Sequence[Episode]]
"""The held-out episodes of a model, by the name of the set."""


def episodes_by_set(place: Workplace, iteration: int) -> EpisodesBySet:
    """Return the held-out episodes of an iteration's model, by set. Sets whose evaluation is not
    finished are left out.
    """
    names = (TEST, *place.recipe.evaluation.sets, REVISION)
    by_set = {name: ended_episodes(place, evaluation_id(place, iteration, name)) for name in names}
    return {name: episodes for name, episodes in by_set.items() if episodes}


# This interval complements Student's interval over the seeds. That one tells how much another seed
# may change; over three seeds it is wide, and it ignores that all arms played the same instances.
# This one tells how certain a difference is on these instances.
def differences(models: Mapping[str, Mapping[int, EpisodesBySet]]) -> tuple[Difference, ...]:
    """Return the mean difference in success between every two models on each set, of the later
    model in `models` minus the earlier one, with a 95% interval.

    Args:
        models: the episodes that each model played, by name and seed. Only seeds and episodes that
            both models have are compared.
    """
    names = list(models)
    results: list[Difference] = []
    for number, name in enumerate(names):
        for other in names[:number]:
            now, before = models[name], models[other]
            seeds = [seed for seed in now if seed in before]
            sets: dict[str, Estimate] = {}
            for title in dict.fromkeys(title for seed in seeds for title in now[seed]):
                pairs = [
                    pair for seed in seeds for pair in gains(now[seed].get(title, ()), before[seed].get(title, ()))
                ]
                # The episodes of one instance under several seeds form one cluster, since they are
                # not independent.
                estimate = finite(mean_gain(pairs))
                if estimate is not None:
                    sets[title] = estimate
            if sets:
                results.append(Difference(arm=name, other=other, sets=sets))
    return tuple(results)


TRAINED = 1
"""The iteration of an arm on a pool; 0 is the model that all arms begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArmResult:
    """An arm with its run. `trained` is the last iteration that the run has trained, `last` the
    iteration whose model the run ends with so far (0: the model that it began with).
    """

    arm: Arm
    place: Workplace
    board: Scoreboard
    trained: int
    last: int


def build_comparison(place: Workplace) -> ComparisonReport:
    """Return the report of the workplace's comparison; arms without an evaluated run have no
    results in it.
    """
    recipe = place.recipe
    arms = arms_of(recipe, place.run_id)
    entries = list(_entries(place, arms))
    results = [(entry, run) for entry in entries if (run := _run(entry, recipe.compare.metrics)) is not None]
    by_name = {name: [run for entry, run in results if entry.arm.name == name] for name in recipe.compare.arms}
    uses: dict[str, str] = {}
    for arm in arms:
        # Name what the arm trains on, and the changes that make its samples differ from the pool's.
        sample_changes = [
            change for change in recipe.compare.arms[arm.name] if arm.samples and change.startswith(OF_SAMPLES)
        ]
        uses[arm.name] = arm.recipe.method if arm.whole else ", ".join([arm.recipe.data.use, *sample_changes])
    # In a comparison of whole runs, the arms' runs evaluate the model that they all begin with.
    boards = [entry.board for entry in entries] if recipe.method == RUNS else [Scoreboard(place)]
    board = next((board for board in boards if board.score(0) is not None), None)
    first = {run.seed: run.score.success.value for run in next(iter(by_name.values()))}
    models: dict[str, dict[int, EpisodesBySet]] = {BASE: {}}
    for entry, _ in results:
        if entry.arm.seed not in models[BASE]:
            models[BASE][entry.arm.seed] = episodes_by_set(entry.place, 0)
        models.setdefault(entry.arm.name, {})[entry.arm.seed] = episodes_by_set(entry.place, entry.last)
    state = run_state(place.store, place.run_id)
    return ComparisonReport(
        recipe_name=recipe.name,
        run_id=place.run_id,
        date=wording.moment((state.finished_at if state else None) or datetime.now(UTC)),
        environment=", ".join(recipe.world_names),
        model=recipe.model.label,
        max_tokens=0 if recipe.method == RUNS else recipe.training.max_tokens,
        max_seconds=0.0 if recipe.method == RUNS else recipe.training.max_seconds,
        seeds=recipe.compare.seeds,
        metrics=recipe.compare.metrics,
        base=board.score(0) if board else None,
        base_metrics=_metric_values(board, 0, recipe.compare.metrics) if board else {},
        arms=tuple(
            _arm(name, uses[name], runs, first, least=min(0.0, recipe.evaluation.disaster_counts))
            for name, runs in by_name.items()
        ),
        differences=differences(models),
        recipe_yaml=yaml.safe_dump(for_display(recipe), sort_keys=False),
    )


def _entries(place: Workplace, arms: Sequence[Arm]) -> Iterator[_ArmResult]:
    whole_runs = place.recipe.method == RUNS
    configs = configs_of_all(place.store) if whole_runs else configs_on_pool(place.store, place.run_id)
    # Runs are found by what their recipes ask for, not by a recomputed id: a recipe stored by an
    # earlier version has fewer fields, and so another id. Of runs that ask for the same, the latest
    # counts.
    recipes = {
        run_id: restored(json.loads(config), source=f"recipe of run {run_id}") for run_id, config in configs.items()
    }
    made_of = {canonical(asked_for(recipe, method_of(recipe))): run_id for run_id, recipe in recipes.items()}
    for arm in arms:
        if run_id := made_of.get(canonical(asked_for(arm.recipe, method := method_of(arm.recipe)))):
            arm_place = replace(place, recipe=arm.recipe, method=method, run_id=run_id)
            trained_iteration, last = ends_with(arm_place) if arm.whole else (TRAINED, TRAINED)
            yield _ArmResult(
                arm=arm, place=arm_place, board=Scoreboard(arm_place), trained=trained_iteration, last=last
            )


def ends_with(place: Workplace) -> tuple[int, int]:
    """Return the last iteration that a run has trained (0 if none), and the iteration whose model
    the run ends with so far: the same one or, with `promote: best`, the promoted one.
    """
    trained_iteration = max(trained_iterations(place.store, place.run_id), default=0)
    best = promoted(place, trained_iteration)
    return trained_iteration, best.iteration if best else trained_iteration


def _arm(name: str, trains_on: str, runs: list[ArmRun], first: dict[int, float], *, least: float) -> ArmReport:
    """Return the report of an arm.

    Args:
        trains_on: what the arm trains on, in words.
        first: the success of the arm that all arms are compared with, by seed.
        least: the lowest reward that an episode may have.
    """
    scores = [run.score for run in runs]
    metric_names = dict.fromkeys(name for run in runs for name in run.metrics)
    return ArmReport(
        name=name,
        trains_on=trains_on,
        runs=tuple(runs),
        success=seed_mean((score.success.value for score in scores), 0, 1),
        reward=seed_mean((score.reward.value for score in scores), least, 1),
        steps=seed_mean(
            (score.steps_to_success for score in scores if score.steps_to_success is not None), 0, math.inf
        ),
        revision=seed_mean((score.revision.value for score in scores if score.revision), 0, 1),
        against=seed_mean((run.score.success.value - first[run.seed] for run in runs if run.seed in first), -1, 1),
        metrics={
            metric: seed_mean((run.metrics[metric] for run in runs if metric in run.metrics), -math.inf, math.inf)
            for metric in metric_names
        },
    )


def _run(entry: _ArmResult, metrics: Sequence[str]) -> ArmRun | None:
    """Return the results of an arm's run; None until it is trained to the end and its last model is
    evaluated.
    """
    arm, place, board, last = entry.arm, entry.place, entry.board, entry.last
    score = board.score(last) if entry.trained and board.score(entry.trained) else None
    if score is None or (arm.whole and entry.trained < arm.recipe.iterations):
        return None
    values = _metric_values(board, last, metrics)
    if arm.whole:
        checkpoint = checkpoint_made(place.store, place.iteration_id(last))
        if checkpoint is None:
            return None
        tokens, seconds = trained_by(place.store, place.run_id)
        return ArmRun(
            seed=arm.seed,
            run_id=place.run_id,
            checkpoint_id=checkpoint.checkpoint_id,
            dataset_hash=checkpoint.dataset_hash or "",
            trained_tokens=tokens,
            sampled_tokens=experience_tokens(place.store, place.run_id),
            seconds=seconds,
            score=score,
            metrics=values,
        )
    training = training_made(place.store, place.iteration_id(TRAINED))
    if training is None:
        return None
    return ArmRun(
        seed=arm.seed,
        run_id=place.run_id,
        checkpoint_id=training.checkpoint_id,
        dataset_hash=training.dataset_hash,
        rows=training.counts["rows"],
        trained_tokens=training.trained_tokens,
        passes=training.trained_tokens / sum(training.counts["trained_tokens"].values()),
        seconds=training.seconds,
        score=score,
        metrics=values,
    )


def _metric_values(board: Scoreboard, iteration: int, metrics: Sequence[str]) -> dict[str, float]:
    """Return the mean of each of `metrics` that an iteration's model has, keyed as in `metrics`:
    `name` is a metric of the test set, `set:name` of another set.
    """
    values: dict[str, float] = {}
    for metric in metrics:
        held_out, _, name = metric.rpartition(":")
        estimate = board.measured(iteration, held_out or TEST).get(name)
        if estimate is not None:
            values[metric] = estimate.mean
    return values


def drawn_on(place: Workplace) -> tuple[Stage, ...]:
    """Return the stages of a pool whose results an arm has already trained on; () for the run of an
    arm. Units that these stages lost are not tried again: later arms must have the same pool.
    """
    if place.recipe.compare.pool:
        return ()
    uses = uses_of_pool(place.store, place.run_id)
    return stages_for(place.recipe, uses, lends_trees=spliced_anew(place.store, place.run_id))
