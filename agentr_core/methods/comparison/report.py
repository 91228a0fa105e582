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
from agentr_core.methods.comparison import COMPARE_RUNS, SAMPLE_FIELDS, Arm, arms_of, stages_for
from agentr_core.methods.table import method_of
from agentr_core.recipes.environments import REVISION, TEST
from agentr_core.recipes.parsing import restore_recipe
from agentr_core.recipes.recipe import display_data
from agentr_core.reports import wording
from agentr_core.reports.comparison import BASE_NAME, ArmReport, ArmRun, ComparisonReport, Difference
from agentr_core.reports.document import Estimate
from agentr_core.runtime.context import RunContext, Stage
from agentr_core.runtime.start import identity_settings
from agentr_core.stages.evaluate import ended_episodes, evaluation_id, gains, mean_gain
from agentr_core.stages.means import seed_mean
from agentr_core.stages.report import Scoreboard, finite_estimate, promoted_model
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.queries.runs import (
    checkpoint_of_iteration,
    configs_of_all,
    configs_of_pool,
    data_uses_of_pool,
    experience_tokens,
    has_respliced_dataset,
    run_state,
    trained_iteration_numbers,
    training_of_iteration,
    training_totals,
)

# Differences between the arms of a comparison, paired by held-out episode over all seeds.

EpisodesBySet = Mapping[str, Sequence[Episode]]
"""The held-out episodes of a model, by the name of the set."""


def episodes_by_set(ctx: RunContext, iteration: int) -> EpisodesBySet:
    """Return the held-out episodes of an iteration's model, by set. Sets whose evaluation is not
    finished are left out.
    """
    names = (TEST, *ctx.recipe.evaluation.sets, REVISION)
    by_set = {name: ended_episodes(ctx, evaluation_id(ctx, iteration, name)) for name in names}
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
    for position, name in enumerate(names):
        for other in names[:position]:
            later_runs, earlier_runs = models[name], models[other]
            seeds = [seed for seed in later_runs if seed in earlier_runs]
            estimates_by_set: dict[str, Estimate] = {}
            for set_name in dict.fromkeys(set_name for seed in seeds for set_name in later_runs[seed]):
                pairs = [
                    pair
                    for seed in seeds
                    for pair in gains(later_runs[seed].get(set_name, ()), earlier_runs[seed].get(set_name, ()))
                ]
                # The episodes of one instance under several seeds form one cluster, since they are
                # not independent.
                estimate = finite_estimate(mean_gain(pairs))
                if estimate is not None:
                    estimates_by_set[set_name] = estimate
            if estimates_by_set:
                results.append(Difference(arm=name, reference=other, estimate_by_set=estimates_by_set))
    return tuple(results)


TRAINED_ITERATION = 1
"""The iteration of an arm on a pool; 0 is the model that all arms begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArmResult:
    """An arm with its run. `trained_iteration` is the last iteration that the run has trained,
    `final_iteration` the iteration whose model the run ends with so far (0: the model that it began
    with).
    """

    arm: Arm
    ctx: RunContext
    scoreboard: Scoreboard
    trained_iteration: int
    final_iteration: int


def build_comparison(ctx: RunContext) -> ComparisonReport:
    """Return the report of the comparison of `ctx`; arms without an evaluated run have no
    results in it.
    """
    recipe = ctx.recipe
    arms = arms_of(recipe, ctx.run_id)
    arm_results = list(_arm_results(ctx, arms))
    finished = [
        (arm_result, arm_run)
        for arm_result in arm_results
        if (arm_run := _arm_run(arm_result, recipe.compare.metrics)) is not None
    ]
    runs_by_arm = {
        name: [arm_run for arm_result, arm_run in finished if arm_result.arm.name == name]
        for name in recipe.compare.arms
    }
    trained_on_by_arm = {arm.name: _trained_on(arm, recipe.compare.arms[arm.name]) for arm in arms}
    # In a comparison of whole runs, the arms' runs evaluate the model that they all begin with.
    scoreboards = (
        [arm_result.scoreboard for arm_result in arm_results] if recipe.method == COMPARE_RUNS else [Scoreboard(ctx)]
    )
    scoreboard = next((scoreboard for scoreboard in scoreboards if scoreboard.score(0) is not None), None)
    success_by_seed = {arm_run.seed: arm_run.score.success.value for arm_run in next(iter(runs_by_arm.values()))}
    models: dict[str, dict[int, EpisodesBySet]] = {BASE_NAME: {}}
    for arm_result, _ in finished:
        if arm_result.arm.seed not in models[BASE_NAME]:
            models[BASE_NAME][arm_result.arm.seed] = episodes_by_set(arm_result.ctx, 0)
        models.setdefault(arm_result.arm.name, {})[arm_result.arm.seed] = episodes_by_set(
            arm_result.ctx, arm_result.final_iteration
        )
    state = run_state(ctx.store, ctx.run_id)
    return ComparisonReport(
        recipe_name=recipe.name,
        run_id=ctx.run_id,
        date=wording.moment((state.finished_at if state else None) or datetime.now(UTC)),
        environment=", ".join(recipe.world_names),
        model=recipe.model.label,
        max_tokens=0 if recipe.method == COMPARE_RUNS else recipe.training.max_tokens,
        max_seconds=0.0 if recipe.method == COMPARE_RUNS else recipe.training.max_seconds,
        seeds=recipe.compare.seeds,
        metrics=recipe.compare.metrics,
        base=scoreboard.score(0) if scoreboard else None,
        base_metrics=_metric_values(scoreboard, 0, recipe.compare.metrics) if scoreboard else {},
        arms=tuple(
            _arm_report(
                name,
                trained_on_by_arm[name],
                runs,
                success_by_seed,
                min_reward=min(0.0, recipe.evaluation.disaster_counts),
            )
            for name, runs in runs_by_arm.items()
        ),
        differences=differences(models),
        recipe_yaml=yaml.safe_dump(display_data(recipe), sort_keys=False),
    )


def _trained_on(arm: Arm, changes: Sequence[str]) -> str:
    """Return what an arm trains on, and those of its changes to the recipe that make its samples
    differ from the pool's.
    """
    if arm.is_whole_run:
        return arm.recipe.method
    sample_changes = [change for change in changes if arm.samples_recipe and change.startswith(SAMPLE_FIELDS)]
    return ", ".join([arm.recipe.data.use, *sample_changes])


def _arm_results(ctx: RunContext, arms: Sequence[Arm]) -> Iterator[_ArmResult]:
    whole_runs = ctx.recipe.method == COMPARE_RUNS
    configs = configs_of_all(ctx.store) if whole_runs else configs_of_pool(ctx.store, ctx.run_id)
    # Runs are found by what their recipes ask for, not by a recomputed id: a recipe stored by an
    # earlier version has fewer fields, and so another id. Of runs that ask for the same, the latest
    # counts.
    recipes = {
        run_id: restore_recipe(json.loads(config), source=f"recipe of run {run_id}")
        for run_id, config in configs.items()
    }
    run_ids_by_request = {
        canonical(identity_settings(recipe, method_of(recipe))): run_id for run_id, recipe in recipes.items()
    }
    for arm in arms:
        if run_id := run_ids_by_request.get(canonical(identity_settings(arm.recipe, method := method_of(arm.recipe)))):
            arm_ctx = replace(ctx, recipe=arm.recipe, method=method, run_id=run_id)
            trained_iteration, final_iteration = (
                last_iterations(arm_ctx) if arm.is_whole_run else (TRAINED_ITERATION, TRAINED_ITERATION)
            )
            yield _ArmResult(
                arm=arm,
                ctx=arm_ctx,
                scoreboard=Scoreboard(arm_ctx),
                trained_iteration=trained_iteration,
                final_iteration=final_iteration,
            )


def last_iterations(ctx: RunContext) -> tuple[int, int]:
    """Return the last iteration that a run has trained (0 if none), and the iteration whose model
    the run ends with so far: the same one or, with `promote: best`, the promoted one.
    """
    trained_iteration = max(trained_iteration_numbers(ctx.store, ctx.run_id), default=0)
    best = promoted_model(ctx, trained_iteration)
    return trained_iteration, best.iteration if best else trained_iteration


def _arm_report(
    name: str, trains_on: str, runs: list[ArmRun], baseline_by_seed: dict[int, float], *, min_reward: float
) -> ArmReport:
    """Return the report of an arm.

    Args:
        trains_on: what the arm trains on, in words.
        baseline_by_seed: the success of the arm that all arms are compared with, by seed.
        min_reward: the lowest reward that an episode may have.
    """
    scores = [run.score for run in runs]
    metric_names = dict.fromkeys(name for run in runs for name in run.metrics)
    return ArmReport(
        name=name,
        trains_on=trains_on,
        runs=tuple(runs),
        success=seed_mean((score.success.value for score in scores), 0, 1),
        reward=seed_mean((score.reward.value for score in scores), min_reward, 1),
        steps=seed_mean(
            (score.steps_to_success for score in scores if score.steps_to_success is not None), 0, math.inf
        ),
        revision=seed_mean((score.revision.value for score in scores if score.revision), 0, 1),
        versus_first=seed_mean(
            (run.score.success.value - baseline_by_seed[run.seed] for run in runs if run.seed in baseline_by_seed),
            -1,
            1,
        ),
        metrics={
            metric: seed_mean((run.metrics[metric] for run in runs if metric in run.metrics), -math.inf, math.inf)
            for metric in metric_names
        },
    )


def _arm_run(arm_result: _ArmResult, metrics: Sequence[str]) -> ArmRun | None:
    """Return the results of an arm's run; None until it is trained to the end and its last model is
    evaluated.
    """
    arm, ctx, scoreboard, final_iteration = (
        arm_result.arm,
        arm_result.ctx,
        arm_result.scoreboard,
        arm_result.final_iteration,
    )
    score = (
        scoreboard.score(final_iteration)
        if arm_result.trained_iteration and scoreboard.score(arm_result.trained_iteration)
        else None
    )
    if score is None or (arm.is_whole_run and arm_result.trained_iteration < arm.recipe.iterations):
        return None
    values = _metric_values(scoreboard, final_iteration, metrics)
    if arm.is_whole_run:
        checkpoint = checkpoint_of_iteration(ctx.store, ctx.iteration_id(final_iteration))
        if checkpoint is None:
            return None
        tokens, seconds = training_totals(ctx.store, ctx.run_id)
        return ArmRun(
            seed=arm.seed,
            run_id=ctx.run_id,
            checkpoint_id=checkpoint.checkpoint_id,
            dataset_hash=checkpoint.dataset_hash or "",
            trained_tokens=tokens,
            sampled_tokens=experience_tokens(ctx.store, ctx.run_id),
            seconds=seconds,
            score=score,
            metrics=values,
        )
    training = training_of_iteration(ctx.store, ctx.iteration_id(TRAINED_ITERATION))
    if training is None:
        return None
    return ArmRun(
        seed=arm.seed,
        run_id=ctx.run_id,
        checkpoint_id=training.checkpoint_id,
        dataset_hash=training.dataset_hash,
        num_rows=training.counts["rows"],
        trained_tokens=training.trained_tokens,
        num_passes=training.trained_tokens / sum(training.counts["trained_tokens"].values()),
        seconds=training.seconds,
        score=score,
        metrics=values,
    )


def _metric_values(scoreboard: Scoreboard, iteration: int, metrics: Sequence[str]) -> dict[str, float]:
    """Return the mean of each of `metrics` that an iteration's model has, keyed as in `metrics`:
    `name` is a metric of the test set, `set:name` of another set.
    """
    values: dict[str, float] = {}
    for metric in metrics:
        held_out, _, name = metric.rpartition(":")
        estimate = scoreboard.measured(iteration, held_out or TEST).get(name)
        if estimate is not None:
            values[metric] = estimate.mean
    return values


def used_stages(ctx: RunContext) -> tuple[Stage, ...]:
    """Return the stages of a pool whose results an arm has already trained on; () for the run of an
    arm. Units that these stages lost are not tried again: later arms must have the same pool.
    """
    if ctx.recipe.compare.pool:
        return ()
    uses = data_uses_of_pool(ctx.store, ctx.run_id)
    return stages_for(ctx.recipe, uses, lends_trees=has_respliced_dataset(ctx.store, ctx.run_id))
