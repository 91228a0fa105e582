"""The scores of a report: every model evaluated so far, on the same held-out instances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from agentr_core.evaluation import metrics
from agentr_core.recipes.evaluation import REVISION, TEST, EvaluationConfig
from agentr_core.reports.records import DepthScore, Estimate, IterationScore, PassAt, SetScore
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id, pass_at_k
from agentr_core.stages.lost_episodes import counted_episodes, lost_episodes
from agentr_core.store.codec.trajectories import Episode

Load = Callable[[int, str], list[Episode]]
"""Returns the counted episodes of an iteration's model on a set."""


def scores(place: Workplace, iteration: int) -> tuple[IterationScore, ...]:
    """Return the score of the base model and of each iteration up to the given one, where it was
    evaluated.
    """
    known: dict[tuple[int, str], list[Episode]] = {}

    def load(number: int, name: str) -> list[Episode]:
        key = number, name
        if key not in known:
            known[key] = counted_episodes(place, evaluation_id(place, number, name))
        return known[key]

    found = []
    for number in range(iteration + 1):
        if episodes := load(number, TEST):
            sets = tuple(_sets(place, number, load)) if place.recipe.evaluation.sets else ()
            score = _score(number, episodes, load(number, REVISION), sets, place.recipe.evaluation)
            names = (TEST, REVISION, *place.recipe.evaluation.sets)
            lost = sum(len(lost_episodes(place, evaluation_id(place, number, name))) for name in names)
            found.append(replace(score, lost=lost, lost_as=place.recipe.errors.count_as))
    return tuple(found)


def difference(place: Workplace, iteration: int, other: int) -> Estimate | None:
    """Return success of an iteration minus that of another one, paired by episode, with its 95%
    interval.

    None when one of the two was not evaluated.
    """
    now, before = (counted_episodes(place, evaluation_id(place, i, TEST)) for i in (iteration, other))
    return _gain(now, before)


def _gain(now: Sequence[Episode], before: Sequence[Episode]) -> Estimate | None:
    """Return the mean gain over the same episodes, clustered by what their instances are variants
    of.
    """
    earlier = {(e.instance.key, e.repeat): e.trajectory.success for e in before}
    same = [(e, earlier[key]) for e in now if (key := (e.instance.key, e.repeat)) in earlier]
    gains = [float(e.trajectory.success) - float(was) for e, was in same]
    return _finite(metrics.clustered_mean(gains, [e.origin for e, _ in same]))


def _sets(place: Workplace, number: int, load: Load) -> Iterable[SetScore]:
    config = place.recipe.evaluation
    splits = {TEST: place.recipe.instances.test} | {name: chosen.split for name, chosen in config.sets.items()}
    for name, split in splits.items():
        if episodes := load(number, name):
            base = load(0, name) if number else []
            yield SetScore(
                name=name,
                split=split,
                instances=len({e.instance.key for e in episodes}),
                success=_share(episodes),
                versus_base=_gain(episodes, base),
                by_depth=tuple(
                    DepthScore(depth=depth, success=_share(some), versus_base=_gain(some, base))
                    for depth, some in _depths(episodes)
                ),
                pass_at=tuple(_pass_at(episodes)),
            )


def _pass_at(episodes: Sequence[Episode]) -> Iterable[PassAt]:
    most = max(e.repeat for e in episodes) + 1
    for k in metrics.powers_of_two(most) if most > 1 else ():
        whole = _finite(pass_at_k(_by_instance(episodes), k))
        if whole is not None:
            parts = ((depth, _finite(pass_at_k(_by_instance(some), k))) for depth, some in _depths(episodes))
            by_depth = tuple(DepthScore(depth=depth, success=part) for depth, part in parts if part is not None)
            yield PassAt(k=k, success=whole, by_depth=by_depth)


def _share(episodes: Sequence[Episode]) -> Estimate:
    """Return the share of successes: by Wilson's score where episodes are independent, else over
    clusters.
    """
    successes = [e.trajectory.success for e in episodes]
    clusters = [e.origin for e in episodes]
    if len(set(clusters)) == len(clusters):
        return _estimate(metrics.success_rate(successes))
    found = _finite(metrics.clustered_share([float(success) for success in successes], clusters))
    return found or _estimate(metrics.success_rate(successes))


def _depths(episodes: Iterable[Episode]) -> list[tuple[int, list[Episode]]]:
    found: dict[int, list[Episode]] = {}
    for episode in episodes:
        if episode.depth is not None:
            found.setdefault(episode.depth, []).append(episode)
    return sorted(found.items())


def _by_instance(episodes: Iterable[Episode]) -> list[list[Episode]]:
    ordered = sorted(episodes, key=lambda e: e.instance.key)
    return [list(group) for _, group in groupby(ordered, key=lambda e: e.instance.key)]


def _score(
    number: int,
    episodes: list[Episode],
    revision: list[Episode],
    sets: tuple[SetScore, ...],
    config: EvaluationConfig,
) -> IterationScore:
    trajectories = [episode.trajectory for episode in episodes]
    # What failed for good did nothing that could repeat itself.
    played = [episode.trajectory for episode in episodes if episode.trajectory_id]
    repeated = metrics.loops([[step.action for step in trajectory.steps] for trajectory in played])
    steps = metrics.mean_steps_to_success(trajectories)
    rewards = [metrics.counted_reward(t, config.disaster_counts) for t in trajectories]
    again = [metrics.counted_reward(e.trajectory, config.disaster_counts) for e in revision]
    return IterationScore(
        iteration=number,
        success=_estimate(metrics.success_rate([t.success for t in trajectories])),
        reward=_estimate(metrics.mean_reward(rewards)),
        steps_to_success=steps if math.isfinite(steps) else None,
        by_depth=tuple(
            DepthScore(depth=depth, success=_estimate(estimate))
            for depth, estimate in metrics.success_by_depth(trajectories, [e.depth for e in episodes]).items()
        ),
        revision=_estimate(metrics.success_rate([e.trajectory.success for e in revision])) if revision else None,
        revision_reward=_estimate(metrics.mean_reward(again)) if revision else None,
        loops=tuple(repeated.per_episode[length] for length in sorted(repeated.per_episode)) if played else (),
        looping=repeated.stuck_share if played else None,
        sets=sets,
    )


def _estimate(estimate: metrics.Estimate) -> Estimate:
    return Estimate(value=estimate.mean, low=estimate.low, high=estimate.high, n=estimate.n)


def _finite(estimate: metrics.Estimate) -> Estimate | None:
    """Return an estimate that has an interval; None for one that has none, or is of nothing."""
    return _estimate(estimate) if math.isfinite(estimate.low) else None
