"""The scores of a report: every model evaluated so far, on the same held-out instances."""

from __future__ import annotations

import math

from agentr_core.evaluation import metrics
from agentr_core.reports.records import DepthScore, Estimate, IterationScore
from agentr_core.stages.evaluate import REVISION, TEST, evaluation_id
from agentr_core.stages.place import Workplace
from agentr_core.store.codec import load_episodes
from agentr_core.store.codec.trajectories import Episode

Z = 1.959964


def scores(place: Workplace, iteration: int) -> tuple[IterationScore, ...]:
    """Return the score of the base model and of each iteration up to the given one, where it was evaluated."""
    env = place.make_environment()
    try:
        found = []
        for number in range(iteration + 1):
            episodes = load_episodes(place.store, evaluation_id(place, number, TEST))
            if episodes:
                depths = [env.depth(episode.instance) for episode in episodes]
                revision = load_episodes(place.store, evaluation_id(place, number, REVISION))
                found.append(_score(number, episodes, depths, revision, place.recipe.evaluation.disaster_counts))
        return tuple(found)
    finally:
        env.close()


def difference(place: Workplace, iteration: int, other: int) -> Estimate | None:
    """Return success of an iteration minus that of another one, paired by instance, with a normal 95% interval.

    None when one of the two was not evaluated.
    """
    now, before = (
        {
            (e.instance.key, e.repeat): e.trajectory.success
            for e in load_episodes(place.store, evaluation_id(place, i, TEST))
        }
        for i in (iteration, other)
    )
    gains = [float(now[key]) - float(before[key]) for key in now.keys() & before.keys()]
    if len(gains) < 2:
        return None
    mean = sum(gains) / len(gains)
    spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
    return Estimate(value=mean, low=mean - Z * spread, high=mean + Z * spread, n=len(gains))


def _score(
    number: int,
    episodes: list[Episode],
    depths: list[int | None],
    revision: list[Episode],
    disaster_counts: float,
) -> IterationScore:
    trajectories = [episode.trajectory for episode in episodes]
    repeated = metrics.loops([[step.action for step in trajectory.steps] for trajectory in trajectories])
    steps = metrics.mean_steps_to_success(trajectories)
    return IterationScore(
        iteration=number,
        success=_estimate(metrics.success_rate([t.success for t in trajectories])),
        reward=_estimate(metrics.mean_reward([metrics.counted_reward(t, disaster_counts) for t in trajectories])),
        steps_to_success=steps if math.isfinite(steps) else None,
        by_depth=tuple(
            DepthScore(depth=depth, success=_estimate(estimate))
            for depth, estimate in sorted(metrics.success_by_depth(trajectories, depths).items())
        ),
        revision=_estimate(metrics.success_rate([e.trajectory.success for e in revision])) if revision else None,
        loops=tuple(repeated.per_episode[length] for length in sorted(repeated.per_episode)),
        looping=repeated.stuck_share,
    )


def _estimate(estimate: metrics.Estimate) -> Estimate:
    return Estimate(value=estimate.mean, low=estimate.low, high=estimate.high, n=estimate.n)
