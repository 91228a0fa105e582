"""Evaluation of a checkpoint on held-out instances, and from the states of the revision test: the
beginnings of episodes that the base model failed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from agentr_core.episodes.transcript import without_foreign_tokens, without_summaries
from agentr_core.errors import DataFault
from agentr_core.evaluation import metrics
from agentr_core.evaluation.episodes import EpisodePlan, episode_plans, revision_plans, revision_seed
from agentr_core.evaluation.metrics import Estimate
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.environments import REVISION, TEST
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.episode_shard import EpisodeShard, EpisodeShards, episode_id, with_ungraded
from agentr_core.runtime.equipment import Checkpoint
from agentr_core.runtime.instances import held_out_by_set
from agentr_core.store.codec.ledger import evaluation_rows, metric_rows, rejection_rows
from agentr_core.store.codec.trajectories import (
    Episode,
    copy_trajectories,
    evaluations_with_same_input,
    load_episodes,
    load_trajectories,
)
from agentr_core.store.database import Store, snapshot
from agentr_core.store.queries import datasets as queries
from agentr_core.store.queries.datasets import (
    evaluation_metrics,
    finished_evaluations,
    instance_traits,
    is_finished,
    rejected_subjects,
)
from agentr_core.store.queries.runs import promoted_checkpoint, run_seed
from agentr_core.store.tables import Row, Rows, merge
from agentr_core.types import EpisodeLimits, Instance, Rejection, Sampling, StopReason, Trajectory

# The measures of an evaluation, by name: the rows of table `metric`, which reports read back.
#
# success, reward, instances, steps_to_success
#                          of all episodes; intervals are Wilson's and a bootstrap's where each is
#                          of an instance of its own, else clustered by what these are variants of
# success_clustered        success, under the name that it once had with such an interval
# gain_over_base, gain_over_previous
#                          success minus that of another model on the same episodes
# reward_within@k          the mean reward that an episode had after k steps, or at its end
# loops@L, looping         how episodes repeat themselves
# reflecting               the share of episodes in which the model itself says one of its method's
#                          reflections
# pass@k                   the chance that one of k episodes of an instance succeeds
# always@k, mixed@k, never@k the share of instances of whose k episodes all, some or none succeed
# mean@k, mean_reward@k    success and reward of an instance's k episodes, as a mean over instances
# best_of_k_success, best_of_k_reward
#                          of the best episode of an instance, by the environment's own reward: a
#                          bound, and a baseline of the ETO paper
# depth-d/...              one of these, for difficulty class d alone
# world-w/...              any of these, for one of several worlds
#
# Measures named with @k, except reward_within and loops, are taken where instances were played
# several times.

Measures = dict[str, Estimate]
REVISION_MEASURES = ("success", "reward", "gain_over_base", "gain_over_previous", "reflecting")
"""The metrics of the revision test, whose episodes begin with steps of another model, different
ones for each episode of an instance.
"""


def measure(
    episodes: Sequence[Episode],
    *,
    base: Sequence[Episode] = (),
    previous: Sequence[Episode] = (),
    disaster_counts: float = 0.0,
    has_reflection: Callable[[str], bool] | None = None,
) -> Measures:
    """Return the measures of the episodes of one model on one set; empty if there are no episodes.

    Args:
        base: the episodes of the model that the run began with, if this is another model.
        previous: the episodes of the previous iteration's model, if that is not the base.
        disaster_counts: the reward that an episode ending in a disaster counts as in a mean.
        has_reflection: whether a reply says one of the method's reflections; None: that is not
            measured.
    """
    if not episodes:
        return {}
    trajectories, origins = [e.trajectory for e in episodes], [e.origin for e in episodes]
    # Episodes that failed for good have no steps that could repeat.
    played_episodes = [e for e in episodes if e.trajectory_id]
    loops = metrics.measure_loops(
        [[step.action for step in without_summaries(e.trajectory.steps)] for e in played_episodes]
    )
    steps = [trajectory.steps for trajectory in trajectories]
    longest = max(map(len, steps))
    measures = _success_measures(episodes, base) | {
        "reward": _mean_reward([metrics.reward_with_disasters(t, disaster_counts) for t in trajectories], origins),
        "instances": _without_interval(len({e.instance.key for e in episodes}), len(episodes)),
        "steps_to_success": _without_interval(
            metrics.mean_steps_to_success(trajectories), sum(trajectory.success for trajectory in trajectories)
        ),
        **{
            f"reward_within@{k}": metrics.clustered_share(
                [path[min(k, len(path)) - 1].reward if path else 0.0 for path in steps], origins
            )
            for k in (metrics.powers_of_two(longest) if longest else ())
        },
        **{
            f"loops@{length}": _without_interval(mean, len(played_episodes))
            for length, mean in loops.per_episode.items()
        },
        "looping": _without_interval(loops.stuck_share, len(played_episodes)),
        "gain_over_previous": gain(episodes, previous),
        **_repeated_measures(episodes, disaster_counts),
    }
    if has_reflection is not None:
        # The share of episodes in which the model says a reflection; replayed steps do not count.
        flags = [any(has_reflection(step.reply) for step in e.trajectory.steps[e.cut :]) for e in played_episodes]
        measures["reflecting"] = metrics.clustered_share(
            [float(flag) for flag in flags], [e.origin for e in played_episodes]
        )
    for depth, group in by_depth(episodes):
        estimates = _success_measures(group, base) | _pass_at(group) | _outcome_shares(group)
        measures |= {f"depth-{depth}/{name}": estimate for name, estimate in estimates.items()}
    return {name: estimate for name, estimate in measures.items() if not math.isnan(estimate.mean)}


def world_measures(measures: Measures, world: str) -> Measures:
    """Return the measures of one of several worlds; empty if it was not played."""
    prefix = f"world-{world}/"
    return {name.removeprefix(prefix): estimate for name, estimate in measures.items() if name.startswith(prefix)}


def measures_by_depth(measures: Measures) -> list[tuple[int, Measures]]:
    """Return the measures of each difficulty class, in ascending order."""
    classes: dict[int, Measures] = {}
    for name, estimate in measures.items():
        if match := re.fullmatch(r"depth-(-?\d+)/(.+)", name):
            classes.setdefault(int(match[1]), {})[match[2]] = estimate
    return sorted(classes.items())


def pass_at_ks(measures: Measures) -> list[int]:
    """Return every k for which pass@k was measured, in ascending order."""
    return sorted(int(name.removeprefix("pass@")) for name in measures if name.startswith("pass@"))


def measure_rows(evaluation_id: str, measures: Measures) -> Rows:
    """Return the rows of the measures of an evaluation."""
    return merge(
        metric_rows(
            "evaluation", evaluation_id, name, e.mean, low=_finite_or_none(e.low), high=_finite_or_none(e.high), n=e.n
        )
        for name, e in measures.items()
    )


def load_measures(store: Store, evaluation_id: str) -> Measures:
    """Return the stored measures of an evaluation, by name; none if it is not finished, or if an
    earlier version stored only some of them. Raises as `Store.reading`.
    """
    measures = {
        metric.name: Estimate(
            mean=metric.value, low=_none_as_nan(metric.low), high=_none_as_nan(metric.high), n=metric.n
        )
        for metric in evaluation_metrics(store, evaluation_id)
    }
    # Every complete set of measures has this one.
    return measures if "success" in measures else {}


def gain(now: Sequence[Episode], before: Sequence[Episode]) -> Estimate:
    """Return the mean change in success from `before` to `now` over the episodes that both have,
    with a 95% interval clustered by the origins of their instances.
    """
    return mean_gain(gains(now, before))


def gains(now: Sequence[Episode], before: Sequence[Episode]) -> list[tuple[float, str]]:
    """Return the change in success, -1, 0 or 1, from `before` to `now` of each episode that both
    have, with the origin of its instance. Episodes that were given other steps in `before` are left
    out.
    """
    earlier = {(e.instance.key, e.repeat, e.cut): e for e in before}
    pairs = []
    for e in now:
        old = earlier.get((e.instance.key, e.repeat, e.cut))
        # An episode that failed for good has no steps to compare; within a run it is the same one.
        if old is not None and (not (e.trajectory_id and old.trajectory_id) or given_replies(e) == given_replies(old)):
            pairs.append((e, old))
    return [(float(e.trajectory.success) - float(old.trajectory.success), e.origin) for e, old in pairs]


def given_replies(episode: Episode) -> tuple[str, ...]:
    """Return the replies that an episode was given at its beginning; none where it failed for good.

    The revision tests of different runs may give the same instance different ones.
    """
    return tuple(step.reply for step in episode.trajectory.steps[: episode.cut])


def mean_gain(clustered_gains: Sequence[tuple[float, str]]) -> Estimate:
    """Return the mean of gains, given as pairs of gain and cluster, with a 95% interval that is
    clipped to [-1, 1].

    If all gains are equal, the interval would have no width: it is then widened on both sides by
    the upper Wilson bound of a share of 0 successes among as many trials as there are clusters.
    """
    origins = [origin for _, origin in clustered_gains]
    estimate = metrics.clustered_mean([gain for gain, _ in clustered_gains], origins)
    if math.isclose(estimate.low, estimate.high, abs_tol=1e-9):
        margin = metrics.success_rate([False] * len(set(origins))).high
        estimate = replace(estimate, low=estimate.mean - margin, high=estimate.mean + margin)
    return metrics.clip_interval(estimate, -1.0, 1.0)


def by_depth(episodes: Iterable[Episode]) -> list[tuple[int, list[Episode]]]:
    """Return the episodes of each difficulty class, in ascending order; those without a class are
    left out.
    """
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        if episode.depth is not None:
            groups.setdefault(episode.depth, []).append(episode)
    return sorted(groups.items())


def _success_measures(episodes: Sequence[Episode], base: Sequence[Episode]) -> Measures:
    share = _success_rate([e.trajectory.success for e in episodes], [e.origin for e in episodes])
    return {"success": share, "success_clustered": share, "gain_over_base": gain(episodes, base)}


def _success_rate(hits: Sequence[bool], clusters: Sequence[str]) -> Estimate:
    """Return the share of hits with a 95% interval: clustered (Student's t) if several hits share a
    cluster and that interval is finite, otherwise Wilson's.
    """
    if len(set(clusters)) == len(clusters):
        return metrics.success_rate(hits)
    share = metrics.clustered_share([float(hit) for hit in hits], clusters)
    return share if math.isfinite(share.low) else metrics.success_rate(hits)


def _mean_reward(rewards: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean reward with a 95% interval: clustered (Student's t) if several rewards share
    a cluster and that interval is finite, otherwise a percentile bootstrap. An interval without
    width, as when all rewards are equal, is replaced by Wilson's.
    """
    independent = len(set(clusters))
    if independent < len(clusters):
        mean = metrics.clip_interval(metrics.clustered_mean(rewards, clusters), min(0.0, *rewards), 1.0)
        if math.isfinite(mean.low):
            return metrics.widen_empty_interval(mean, independent)
    return metrics.widen_empty_interval(metrics.mean_reward(rewards), len(rewards))


def _repeated_measures(episodes: Sequence[Episode], disaster_counts: float) -> Measures:
    """Return the measures of instances that have several episodes; empty if each has only one."""
    groups = by_instance(episodes)
    max_episodes = max(map(len, groups))
    if max_episodes < 2:
        return {}
    rewards = [[metrics.reward_with_disasters(e.trajectory, disaster_counts) for e in group] for group in groups]
    origins = [group[0].origin for group in groups]
    means = [fmean(e.trajectory.success for e in group) for group in groups]
    return {
        f"best_of_{max_episodes}_success": _success_rate(
            [any(e.trajectory.success for e in group) for group in groups], origins
        ),
        f"best_of_{max_episodes}_reward": _mean_reward([max(values) for values in rewards], origins),
        f"mean@{max_episodes}": metrics.clustered_share(means, origins),
        f"mean_reward@{max_episodes}": _mean_reward([fmean(values) for values in rewards], origins),
        **_pass_at(episodes),
        **_outcome_shares(episodes),
    }


def _pass_at(episodes: Sequence[Episode]) -> Measures:
    """Return pass@k for k = 1, 2, 4, ...; instances of fewer than k episodes are left out."""
    groups = by_instance(episodes)
    max_episodes = max(map(len, groups))
    measures = {}
    for k in metrics.powers_of_two(max_episodes) if max_episodes > 1 else ():
        large_groups = [group for group in groups if len(group) >= k]
        measures[f"pass@{k}"] = metrics.clustered_share(
            [metrics.pass_at(k, len(group), sum(e.trajectory.success for e in group)) for group in large_groups],
            [group[0].origin for group in large_groups],
        )
    return measures


def _outcome_shares(episodes: Sequence[Episode]) -> Measures:
    """Return the shares of instances whose episodes were always, sometimes and never successes,
    among those with the most episodes; empty if each was played once.
    """
    groups = by_instance(episodes)
    max_episodes = max(map(len, groups))
    if max_episodes < 2:
        return {}
    full_groups = [group for group in groups if len(group) == max_episodes]
    shares = [fmean(e.trajectory.success for e in group) for group in full_groups]
    origins = [group[0].origin for group in full_groups]
    flags_by_outcome = {
        "always": [s == 1 for s in shares],
        "mixed": [0 < s < 1 for s in shares],
        "never": [s == 0 for s in shares],
    }
    return {f"{outcome}@{max_episodes}": _success_rate(flags, origins) for outcome, flags in flags_by_outcome.items()}


def by_instance(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """Return the episodes of each instance, in the order of their first episodes."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.instance.key, []).append(episode)
    return list(groups.values())


def _without_interval(value: float, n: int) -> Estimate:
    """Return an estimate without an interval: its bounds are NaN."""
    return Estimate(mean=value, low=math.nan, high=math.nan, n=n)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _none_as_nan(value: float | None) -> float:
    return math.nan if value is None else value


# The states of the revision test: chosen once for a run, stored, and the same for every model that
# is tested.


def revision_states(ctx: RunContext, base_evaluation: str) -> tuple[EpisodePlan, ...]:
    """Return the episodes of the revision test: those of the run that the recipe names, else those
    of this run.

    This run's are chosen from the failed episodes of evaluation `base_evaluation` when they are
    first needed.

    Raises:
        DataFault: the other run has no states, or they are of another environment; or the first
            model of this run was not evaluated before.
    """
    with snapshot(ctx.store) as state:
        ctx = replace(ctx, store=state)
        other_run = ctx.recipe.evaluation.revision_test.states
        if other_run:
            plans = _load_states(ctx, other_run)
            if not plans:
                raise DataFault(
                    f"run {other_run} has no states of a revision test; name a run whose first model was evaluated, in "
                    "evaluation.revision_test.states"
                )
            environments = {
                instance.environment for instances in held_out_by_set(ctx).values() for instance in instances
            }
            unknown_environment = next(
                (plan.instance.environment for plan in plans if plan.instance.environment not in environments), None
            )
            if unknown_environment is not None:
                raise DataFault(f"the states of run {other_run} are of {unknown_environment}, not of this environment")
            return tuple(replace(plan, prefix=without_foreign_tokens(plan.prefix)) for plan in plans)
        owner = ctx.recipe.compare.pool or ctx.run_id
        plans = _load_states(ctx, owner)
        if plans:
            return plans
        config = ctx.recipe.evaluation.revision_test
        base_episodes = load_episodes(ctx.store, base_evaluation)
        if not base_episodes:
            raise DataFault(f"run {ctx.run_id} has no episodes of its first model yet; evaluate iteration 0 first")
        cuts, rejections = revision_plans(
            [(e.repeat, e.trajectory) for e in base_episodes], cuts=config.cuts, seed=_cut_seed(ctx)
        )
        limit = min(config.limit or len(cuts), len(cuts))
        plans = tuple(cuts[position * len(cuts) // limit] for position in range(limit))
        trajectory_ids = {(episode.instance.key, episode.repeat): episode.trajectory_id for episode in base_episodes}
        rows: list[Row] = [
            {
                "run_id": owner,
                "position": position,
                "trajectory_id": trajectory_ids[plan.instance.key, plan.number],
                "repeat": plan.number,
                "cut": len(plan.prefix),
            }
            for position, plan in enumerate(plans)
        ]
        ctx.store.write({"revision_state": rows, **rejection_rows(rejections, iteration_id=ctx.iteration_id(0))})
        return plans


def _load_states(ctx: RunContext, run_id: str) -> tuple[EpisodePlan, ...]:
    states = queries.revision_states(ctx.store, run_id)
    trajectories = load_trajectories(ctx.store, list({state.trajectory_id for state in states}))
    seed = _cut_seed(ctx)
    return tuple(
        EpisodePlan(
            instance=trajectories[state.trajectory_id].instance,
            number=state.repeat,
            seed=revision_seed(seed, trajectories[state.trajectory_id].instance, state.repeat, state.cut),
            prefix=trajectories[state.trajectory_id].steps[: state.cut],
        )
        for state in states
    )


def _cut_seed(ctx: RunContext) -> int:
    """Return the seed of the cuts: all arms of a comparison use the same cuts."""
    pool = run_seed(ctx.store, ctx.recipe.compare.pool)
    return ctx.recipe.seed if pool is None else pool


# Episodes of an evaluation that failed for good: kept as rejections, counted as the recipe says,
# and never used as data.

STAGE = "evaluate"
NO_REWARD = "no-reward"


def counted_episodes(ctx: RunContext, evaluation_id: str) -> list[Episode]:
    """Return the episodes over which the means of an evaluation are taken.

    With `errors.count_as: zero` those that failed for good are among them, as failures without a
    step.
    """
    episodes = load_episodes(ctx.store, evaluation_id)
    return episodes if ctx.recipe.errors.count_as == "out" else [*episodes, *lost_episodes(ctx, evaluation_id)]


def ended_episodes(ctx: RunContext, evaluation_id: str) -> list[Episode]:
    """Return `counted_episodes` of an evaluation once it is finished; before that none, since
    successful episodes tend to end first.
    """
    return counted_episodes(ctx, evaluation_id) if is_finished(ctx.store, evaluation_id) else []


def lost_episodes(ctx: RunContext, evaluation_id: str) -> list[Episode]:
    """Return the episodes of an evaluation that failed for good and were not played since, as
    failures without a step.
    """
    subjects = rejected_subjects(ctx.store, stage=STAGE, reason=NO_REWARD, prefix=f"{evaluation_id}:")
    if not subjects:
        return []
    played_keys = {_plan_key(episode) for episode in load_episodes(ctx.store, evaluation_id)}
    episodes: list[Episode] = []
    for subject in subjects:
        key = subject.removeprefix(f"{evaluation_id}:")
        if key in played_keys:
            continue
        name, _, numbers = key.rpartition("#")
        environment, split, index = name.rsplit("/", 2)
        repeat, _, cut = numbers.partition("@")
        instance = Instance(environment=environment, split=split, index=int(index))
        failure = Trajectory(
            instance=instance, first_observation="", steps=(), reward=0.0, success=False, stop=StopReason.FAILURE
        )
        episodes.append(
            Episode(trajectory_id="", instance=instance, repeat=int(repeat), cut=int(cut or 0), trajectory=failure)
        )
    traits = instance_traits(ctx.store, [episode.instance.key for episode in episodes])
    return [replace(episode, **asdict(traits[episode.instance.key])) for episode in episodes]


def _plan_key(episode: Episode) -> str:
    return episode.instance.episode(episode.repeat, episode.cut)


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


def evaluation_id(ctx: RunContext, iteration: int, name: str) -> str:
    """Return the id of an evaluation of the checkpoint that an iteration made (0: the base
    model).
    """
    recipe = ctx.recipe
    iteration_id = ctx.iteration_id(iteration) if iteration else ctx.source_id(0)
    # Neither further sets nor the choice of the development set may change the ids of other
    # evaluations.
    shared_config = dataclasses.replace(recipe.evaluation, sets={}, development="")
    set_config = [recipe.evaluation.sets[name]] if name in recipe.evaluation.sets else []
    worlds = recipe.environments or recipe.instances
    return fingerprint("evaluation", VERSION, iteration_id, name, shared_config, worlds, *set_config)


async def evaluate(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Play the missing episodes of the evaluations of an iteration's checkpoint, and promote the
    checkpoint that the next iteration goes on from; return the success estimate of each evaluation,
    by its name.

    The revision test continues failed episodes of the base model.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: the checkpoint is missing, iteration 0 was not evaluated before, or no checkpoint
            has episodes by which it could be promoted.
    """
    recipe, config = ctx.recipe, ctx.recipe.evaluation
    chosen_sets = {
        name: evaluation_set
        for name, evaluation_set in config.sets.items()
        if evaluation_set.models == "all" or iteration == 0
    }
    instances = held_out_by_set(ctx)
    seed = derive_seed(recipe.seed, "evaluate", iteration)
    test_plans = episode_plans(instances[TEST], episodes=config.episodes, seed=seed)
    series = [_evaluation_series(ctx, iteration, TEST, _test_split(recipe), test_plans)]
    for name, evaluation_set in chosen_sets.items():
        plans = episode_plans(instances[name], episodes=evaluation_set.episodes, seed=derive_seed(seed, name))
        series.append(_evaluation_series(ctx, iteration, name, evaluation_set.split, plans))
    if not config.revision_test.enabled:
        scores = await _play_and_measure(ctx, iteration, series)
    elif iteration == 0:
        # The states of the revision test are among the episodes that are played first.
        scores = await _play_and_measure(ctx, iteration, series)
        scores |= await _play_and_measure(ctx, iteration, [_revision_series(ctx, iteration)])
    else:
        scores = await _play_and_measure(ctx, iteration, [*series, _revision_series(ctx, iteration)])
    iteration_id = ctx.iteration_id(iteration)
    # A stored choice is not changed: later iterations were made with it.
    if recipe.promote != "best" or promoted_checkpoint(ctx.store, iteration_id) is not None:
        return scores
    # Of the checkpoints so far, the one that succeeds most often on the development set; of equals
    # the earliest, since a later one has nothing to show for its training.
    name = config.development
    measures_by_iteration = (
        load_measures(ctx.store, evaluation_id(ctx, number, name)) for number in range(iteration + 1)
    )
    successes = {number: measures["success"].mean for number, measures in enumerate(measures_by_iteration) if measures}
    if not successes:
        raise DataFault(
            f"no episode of set {name} came to its end, so no checkpoint can be promoted; `select * from event` says "
            "what failed"
        )
    best = max(successes, key=lambda number: (successes[number], -number))
    ctx.store.update("iteration", {"iteration_id": iteration_id, "promoted": ctx.trained_checkpoint(best).id})
    return scores


def _revision_series(ctx: RunContext, iteration: int) -> Series:
    """Return the revision test: episodes that continue the first steps of episodes that the base
    model failed.
    """
    states = revision_states(ctx, evaluation_id(ctx, 0, TEST))
    split = _test_split(ctx.recipe)
    return _evaluation_series(ctx, iteration, REVISION, split, states)


def _evaluation_series(
    ctx: RunContext, iteration: int, name: str, split: str, plans: tuple[EpisodePlan, ...]
) -> Series:
    config = ctx.recipe.evaluation
    set_config = config.sets.get(name, config)
    return Series(
        evaluation_id=evaluation_id(ctx, iteration, name),
        name=name,
        split=split,
        plans=with_step_limits(ctx.recipe, name, plans),
        sampling=set_config.sampling(temperature=set_config.temperature, max_new_tokens=config.max_new_tokens),
        max_steps=config.revision_test.max_steps if name == REVISION else config.max_steps,
        repeats=config.repeats,
        limits=config.limits,
        config=set_config,
    )


def with_step_limits(recipe: Recipe, name: str, plans: Iterable[EpisodePlan]) -> tuple[EpisodePlan, ...]:
    """Return plans with the limits on steps and repeated steps of their worlds; the revision test
    has one step limit for all worlds.
    """
    limits = {world: config.evaluation for world, config in recipe.worlds().items()}
    limited_plans = []
    for plan in plans:
        evaluation = limits[recipe.world_name(plan.instance.environment)]
        steps = recipe.evaluation.revision_test.max_steps if name == REVISION else evaluation.max_steps
        limited_plans.append(dataclasses.replace(plan, max_steps=steps, repeats=evaluation.repeats))
    return tuple(limited_plans)


def _test_split(recipe: Recipe) -> str:
    """Return the name of the split that is tested; for several worlds, the distinct names."""
    return "+".join(dict.fromkeys(world.instances.test for world in recipe.worlds().values()))


async def _play_and_measure(ctx: RunContext, iteration: int, series: Sequence[Series]) -> dict[str, Any]:
    """Play the missing episodes of several evaluations together, and store their measures; return
    the success estimate of each by name.
    """
    has_new_episodes = await play_evaluations(ctx, iteration, series)
    with snapshot(ctx.store) as state:
        snapshot_ctx = dataclasses.replace(ctx, store=state)
        results = [(evaluation, measure_evaluation(snapshot_ctx, iteration, evaluation.name)) for evaluation in series]
    store_measures(ctx, iteration, results)
    scores = {
        evaluation.name: asdict(measures["success"]) if measures else {"n": 0} for evaluation, measures in results
    }
    if has_new_episodes:
        # The gains of later iterations are relative to this one.
        with snapshot(ctx.store) as state:
            snapshot_ctx = dataclasses.replace(ctx, store=state)
            later_evaluations = [
                evaluation
                for evaluation in finished_evaluations(state, ctx.run_id, after=iteration)
                if evaluation.name in scores
            ]
            rows = [
                measure_rows(
                    evaluation.evaluation_id, measure_evaluation(snapshot_ctx, evaluation.iteration, evaluation.name)
                )
                for evaluation in later_evaluations
            ]
        if rows:
            ctx.store.write(merge(rows))
    return scores


async def play_evaluations(ctx: RunContext, iteration: int, series: Sequence[Series]) -> bool:
    """Play those episodes of several evaluations that are not stored yet, all at once; return
    whether there were any to play.

    Episodes that failed for good are stored as rejections. Raises as `evaluate`.
    """
    checkpoint = ctx.trained_checkpoint(iteration)
    ctx.store.write(
        merge(_evaluation_rows(ctx, iteration, evaluation, checkpoint, finished=False) for evaluation in series)
    )
    _copy_episodes(ctx, iteration, series, checkpoint)
    iteration_id = ctx.iteration_id(iteration)
    shards: list[EpisodeShard] = []
    with snapshot(ctx.store) as state:
        for evaluation in series:
            stored_keys = {(e.instance.key, e.repeat, e.cut) for e in load_episodes(state, evaluation.evaluation_id)}
            plans = tuple(p for p in evaluation.plans if (p.instance.key, p.number, len(p.prefix)) not in stored_keys)
            if not plans:
                continue
            shard = EpisodeShard(
                stage=STAGE,
                evaluation_id=evaluation.evaluation_id,
                name=evaluation.name,
                iteration=iteration,
                checkpoint=checkpoint,
                plans=plans,
                sampling=evaluation.sampling,
                max_steps=evaluation.max_steps,
                repeats=evaluation.repeats,
                limits=evaluation.limits,
                done=len(evaluation.plans) - len(plans),
                total=len(evaluation.plans),
            )
            shards.append(with_ungraded(state, shard, iteration_id))
    if not shards:
        return False
    names = ", ".join(shard.name for shard in shards)
    await ctx.work_through(EpisodeShards(shards=tuple(shards)), f"{STAGE} {names}", iteration, f"episodes of {names}")
    rejections: list[Rejection] = []
    detail = "the episode has no reward; table event has the error that ended it"
    with snapshot(ctx.store) as state:
        for evaluation in series:
            played_keys = {_plan_key(episode) for episode in load_episodes(state, evaluation.evaluation_id)}
            subjects = [
                f"{evaluation.evaluation_id}:{plan.key}" for plan in evaluation.plans if plan.key not in played_keys
            ]
            rejections += [
                Rejection(stage=STAGE, subject=subject, reason=NO_REWARD, detail=detail) for subject in subjects
            ]
    if rejections:
        ctx.store.write(rejection_rows(rejections, iteration_id=iteration_id))
    return True


def _copy_episodes(ctx: RunContext, iteration: int, series: Sequence[Series], checkpoint: Checkpoint) -> None:
    """Copy missing episodes from evaluations of other runs that played the same episodes with the
    same weights.
    """
    copies: list[tuple[str, dict[str, str]]] = []
    with snapshot(ctx.store) as state:
        for evaluation in series:
            stage = STAGE if evaluation.name in (TEST, REVISION) else f"{STAGE}/{evaluation.name}"
            sources = evaluations_with_same_input(
                state,
                ctx.run_id,
                stage,
                iteration=iteration,
                name=evaluation.name,
                weights_sha256=checkpoint.weights_sha256,
            )
            played_keys = (
                {_plan_key(episode) for episode in load_episodes(state, evaluation.evaluation_id)} if sources else set()
            )
            missing = {plan.key: plan for plan in evaluation.plans if plan.key not in played_keys}
            originals: dict[str, str] = {}
            for source in sources:
                for episode in load_episodes(state, source) if missing else []:
                    plan = missing.get(key := _plan_key(episode))
                    # The revision test of another run may go on from other steps.
                    if plan and given_replies(episode) == tuple(step.reply for step in plan.prefix):
                        originals[episode_id(evaluation.evaluation_id, key)] = episode.trajectory_id
                        del missing[key]
            if originals:
                copies.append((evaluation.evaluation_id, originals))
    for target, originals in copies:
        copy_trajectories(ctx.store, originals, evaluation_id=target, iteration_id=ctx.iteration_id(iteration))


# Measures are stored as rows, so that SQL, reports and the viewer show the same numbers.
def store_measures(ctx: RunContext, iteration: int, results: Sequence[tuple[Series, Measures]]) -> None:
    """Store the measures of evaluations, and mark the evaluations as finished."""
    checkpoint = ctx.trained_checkpoint(iteration)
    heads = (_evaluation_rows(ctx, iteration, evaluation, checkpoint, finished=True) for evaluation, _ in results)
    ctx.store.write(
        merge([*heads, *(measure_rows(evaluation.evaluation_id, measures) for evaluation, measures in results)])
    )


def _evaluation_rows(
    ctx: RunContext, iteration: int, evaluation: Series, checkpoint: Checkpoint, *, finished: bool
) -> Rows:
    return evaluation_rows(
        evaluation.evaluation_id,
        iteration_id=ctx.iteration_id(iteration),
        checkpoint_id=checkpoint.id,
        name=evaluation.name,
        split=evaluation.split,
        config=evaluation.config,
        finished=finished,
    )


def measure_evaluation(ctx: RunContext, iteration: int, name: str) -> Measures:
    """Return the measures of the stored episodes of an evaluation; empty if there are none. Gains
    are relative to models whose evaluations are finished.
    """
    current = counted_episodes(ctx, evaluation_id(ctx, iteration, name))
    base = ended_episodes(ctx, evaluation_id(ctx, 0, name)) if iteration else []
    previous = ended_episodes(ctx, evaluation_id(ctx, iteration - 1, name)) if iteration > 1 else []

    def measures_of(episodes: Sequence[Episode]) -> Measures:
        result = measure(
            episodes,
            base=base,
            previous=previous,
            disaster_counts=ctx.recipe.evaluation.disaster_counts,
            has_reflection=ctx.method.has_reflection,
        )
        result |= ctx.method.measures(ctx, iteration, name, episodes)
        return result if name != REVISION else {key: result[key] for key in REVISION_MEASURES if key in result}

    # A further set belongs to one world.
    if not ctx.recipe.environments or name in ctx.recipe.evaluation.sets:
        return measures_of(current)
    # Difficulty classes of different worlds are not the same, so they are measured only by world.
    measures = {name: estimate for name, estimate in measures_of(current).items() if not name.startswith("depth-")}
    for world in dict.fromkeys(episode.instance.environment for episode in current):
        measures_of_world = measures_of([episode for episode in current if episode.instance.environment == world])
        measures |= {f"world-{world}/{name}": estimate for name, estimate in measures_of_world.items()}
    return measures
