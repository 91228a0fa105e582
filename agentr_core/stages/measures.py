"""The measures of an evaluation, by name: the rows of table `metric`, which reports read back.

success, reward, instances, steps_to_success
                            of all episodes; intervals are Wilson's and a bootstrap's where each is
                            of an instance of its own, else clustered by what these are variants of
success_clustered           success, under the name that it once had with such an interval
gain_over_base, gain_over_previous
                            success minus that of another model on the same episodes
reward_within@k             the mean reward that an episode had after k steps, or at its end
loops@L, looping            how episodes repeat themselves
reflecting                  the share of episodes in which the model itself says one of its method's
                            reflections
pass@k                      the chance that one of k episodes of an instance succeeds
always@k, mixed@k, never@k  the share of instances of whose k episodes all, some or none succeed
mean@k, mean_reward@k       success and reward of an instance's k episodes, as a mean over instances
best_of_k_success, best_of_k_reward
                            of the best episode of an instance, by the environment's own reward: a
                            bound, and a baseline of the ETO paper
depth-d/...                 one of these, for difficulty class d alone
world-w/...                 any of these, for one of several worlds

Measures named with @k, except reward_within and loops, are taken where instances were played
several times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from agentr_core.evaluation import metrics
from agentr_core.evaluation.metrics import Estimate
from agentr_core.store.codec.ledger import metric_rows
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.database import Store
from agentr_core.store.queries.evaluations import evaluation_metrics
from agentr_core.store.tables import Rows, merge

Measures = dict[str, Estimate]
OF_REVISION = ("success", "reward", "gain_over_base", "gain_over_previous", "reflecting")
"""The metrics of the revision test, whose episodes begin with steps of another model, different
ones for each episode of an instance.
"""


def measure(
    episodes: Sequence[Episode],
    *,
    base: Sequence[Episode] = (),
    previous: Sequence[Episode] = (),
    disaster_counts: float = 0.0,
    voiced: Callable[[str], bool] | None = None,
) -> Measures:
    """Return the measures of the episodes of one model on one set; empty if there are no episodes.

    Args:
        base: the episodes of the model that the run began with, if this is another model.
        previous: the episodes of the previous iteration's model, if that is not the base.
        disaster_counts: the reward that an episode ending in a disaster counts as in a mean.
        voiced: whether a reply says one of the method's reflections; None: that is not measured.
    """
    if not episodes:
        return {}
    found = (
        _shares(episodes, base)
        | _overall(episodes, disaster_counts)
        | {"gain_over_previous": gain(episodes, previous)}
        | _repeated(episodes, disaster_counts)
        | ({} if voiced is None else {"reflecting": _reflecting(episodes, voiced)})
    )
    for depth, some in by_depth(episodes):
        classed = _shares(some, base) | _pass_at(some) | _contrast(some)
        found |= {f"depth-{depth}/{name}": estimate for name, estimate in classed.items()}
    return {name: estimate for name, estimate in found.items() if not math.isnan(estimate.mean)}


def measure_worlds(episodes: Sequence[Episode], measured: Callable[[Sequence[Episode]], Measures]) -> Measures:
    """Return the measures of all episodes, and those of each world as `world-NAME/...`.

    Difficulty classes of different worlds are not the same, so they are measured only by world.
    """
    found = {name: estimate for name, estimate in measured(episodes).items() if not name.startswith("depth-")}
    for world in dict.fromkeys(episode.instance.environment for episode in episodes):
        own = measured([episode for episode in episodes if episode.instance.environment == world])
        found |= {f"world-{world}/{name}": estimate for name, estimate in own.items()}
    return found


def of_world(measures: Measures, world: str) -> Measures:
    """Return the measures of one of several worlds; empty if it was not played."""
    prefix = f"world-{world}/"
    return {name.removeprefix(prefix): estimate for name, estimate in measures.items() if name.startswith(prefix)}


def of_depths(measures: Measures) -> list[tuple[int, Measures]]:
    """Return the measures of each difficulty class, in ascending order."""
    classes: dict[int, Measures] = {}
    for name, estimate in measures.items():
        if classed := re.fullmatch(r"depth-(-?\d+)/(.+)", name):
            classes.setdefault(int(classed[1]), {})[classed[2]] = estimate
    return sorted(classes.items())


def ks_of_pass(measures: Measures) -> list[int]:
    """Return every k for which pass@k was measured, in ascending order."""
    return sorted(int(name.removeprefix("pass@")) for name in measures if name.startswith("pass@"))


def measure_rows(evaluation_id: str, measures: Measures) -> Rows:
    """Return the rows of the measures of an evaluation."""
    return merge(
        metric_rows("evaluation", evaluation_id, name, e.mean, low=_number(e.low), high=_number(e.high), n=e.n)
        for name, e in measures.items()
    )


def load_measures(store: Store, evaluation_id: str) -> Measures:
    """Return the stored measures of an evaluation; empty until it is finished, and in stores of
    versions that stored only some measures. Raises as `Store.reading`.
    """
    found = {
        one.name: Estimate(mean=one.value, low=_or_nan(one.low), high=_or_nan(one.high), n=one.n)
        for one in evaluation_metrics(store, evaluation_id)
    }
    return found if "success" in found else {}


def gain(now: Sequence[Episode], before: Sequence[Episode]) -> Estimate:
    """Return the mean gain over the same episodes, clustered by what their instances are variants
    of.
    """
    return mean_gain(gains(now, before))


def gains(now: Sequence[Episode], before: Sequence[Episode]) -> list[tuple[float, str]]:
    """Return the gain, -1, 0 or 1, of each episode over the same one in `before`, with what its
    instance is a variant of; episodes that `before` lacks are left out.
    """
    earlier = {(e.instance.key, e.repeat, e.cut): e for e in before}
    found = ((e, earlier.get((e.instance.key, e.repeat, e.cut))) for e in now)
    same = [(e, was) for e, was in found if was is not None and _may_be_the_same(e, was)]
    return [(float(e.trajectory.success) - float(was.trajectory.success), e.origin) for e, was in same]


def given_steps(episode: Episode) -> tuple[str, ...]:
    """Return the replies that an episode was given at its beginning; none where it failed for good.

    The revision tests of different runs may give the same instance different ones.
    """
    return tuple(step.reply for step in episode.trajectory.steps[: episode.cut])


def _may_be_the_same(one: Episode, other: Episode) -> bool:
    # An episode that failed for good has no steps to compare; within a run it is the same one.
    lost = not (one.trajectory_id and other.trajectory_id)
    return lost or given_steps(one) == given_steps(other)


def mean_gain(found: Sequence[tuple[float, str]]) -> Estimate:
    """Return the mean of gains, each with its cluster; its interval is clipped to [-1, 1].

    Where all gains are equal, that interval would have no width; it then reaches as far as the
    share of clusters that differ might, none of those seen having done so (Wilson).
    """
    origins = [origin for _, origin in found]
    gained = metrics.clustered_mean([gain for gain, _ in found], origins)
    if gained.low == gained.high:
        unseen = metrics.success_rate([False] * len(set(origins))).high
        gained = replace(gained, low=gained.mean - unseen, high=gained.mean + unseen)
    return metrics.within(gained, -1.0, 1.0)


def by_depth(episodes: Iterable[Episode]) -> list[tuple[int, list[Episode]]]:
    """Return the episodes of each difficulty class, in ascending order."""
    found: dict[int, list[Episode]] = {}
    for episode in episodes:
        if episode.depth is not None:
            found.setdefault(episode.depth, []).append(episode)
    return sorted(found.items())


def _overall(episodes: Sequence[Episode], disaster_counts: float) -> Measures:
    trajectories = [episode.trajectory for episode in episodes]
    # Episodes that failed for good have no steps that could repeat.
    played = [episode.trajectory for episode in episodes if episode.trajectory_id]
    repeated = metrics.loops([[step.action for step in trajectory.steps] for trajectory in played])
    solved = sum(trajectory.success for trajectory in trajectories)
    loops = {f"loops@{length}": _plain(mean, len(played)) for length, mean in repeated.per_episode.items()}
    return {
        "reward": _reward(
            [metrics.counted_reward(t, disaster_counts) for t in trajectories], [e.origin for e in episodes]
        ),
        "instances": _plain(len({e.instance.key for e in episodes}), len(episodes)),
        "steps_to_success": _plain(metrics.mean_steps_to_success(trajectories), solved),
        **_reward_within(episodes),
        **loops,
        "looping": _plain(repeated.stuck_share, len(played)),
    }


def _shares(episodes: Sequence[Episode], base: Sequence[Episode]) -> Measures:
    share = _share(episodes)
    return {"success": share, "success_clustered": share, "gain_over_base": gain(episodes, base)}


def _share(episodes: Sequence[Episode]) -> Estimate:
    """Return the share of successes."""
    return _rate([e.trajectory.success for e in episodes], [e.origin for e in episodes])


def _rate(hits: Sequence[bool], clusters: Sequence[str]) -> Estimate:
    """Return the share of hits: with Wilson's interval where each is a cluster of its own, else
    over clusters.
    """
    if len(set(clusters)) == len(clusters):
        return metrics.success_rate(hits)
    found = metrics.clustered_share([float(hit) for hit in hits], clusters)
    return found if math.isfinite(found.low) else metrics.success_rate(hits)


def _reward(rewards: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean reward: with a bootstrap interval where each is a cluster of its own, else
    over clusters; where all rewards are equal, with Wilson's.
    """
    independent = len(set(clusters))
    if independent < len(clusters):
        found = metrics.within(metrics.clustered_mean(rewards, clusters), min(0.0, *rewards), 1.0)
        if math.isfinite(found.low):
            return metrics.with_width(found, independent)
    return metrics.with_width(metrics.mean_reward(rewards), len(rewards))


def _reward_within(episodes: Sequence[Episode]) -> Measures:
    steps = [episode.trajectory.steps for episode in episodes]
    longest = max(map(len, steps))
    if not longest:
        return {}
    return {
        f"reward_within@{k}": metrics.clustered_share(
            [taken[min(k, len(taken)) - 1].reward if taken else 0.0 for taken in steps], [e.origin for e in episodes]
        )
        for k in metrics.powers_of_two(longest)
    }


def _repeated(episodes: Sequence[Episode], disaster_counts: float) -> Measures:
    """Return the measures of instances that have several episodes; empty if each has only one."""
    groups = by_instance(episodes)
    most = max(map(len, groups))
    if most < 2:
        return {}
    rewards = [[metrics.counted_reward(e.trajectory, disaster_counts) for e in group] for group in groups]
    origins = [group[0].origin for group in groups]
    means = [fmean(e.trajectory.success for e in group) for group in groups]
    return {
        f"best_of_{most}_success": _rate([any(e.trajectory.success for e in group) for group in groups], origins),
        f"best_of_{most}_reward": _reward([max(some) for some in rewards], origins),
        f"mean@{most}": metrics.clustered_share(means, origins),
        f"mean_reward@{most}": _reward([fmean(some) for some in rewards], origins),
        **_pass_at(episodes),
        **_contrast(episodes),
    }


def _pass_at(episodes: Sequence[Episode]) -> Measures:
    """Return pass@k for k = 1, 2, 4, ...; instances of fewer than k episodes are left out."""
    groups = by_instance(episodes)
    most = max(map(len, groups))
    found = {}
    for k in metrics.powers_of_two(most) if most > 1 else ():
        counted = [group for group in groups if len(group) >= k]
        found[f"pass@{k}"] = metrics.clustered_share(
            [metrics.pass_at(k, len(group), sum(e.trajectory.success for e in group)) for group in counted],
            [group[0].origin for group in counted],
        )
    return found


def _contrast(episodes: Sequence[Episode]) -> Measures:
    """Return the shares of instances that are always, sometimes and never won; empty if each was
    played once.
    """
    groups = by_instance(episodes)
    most = max(map(len, groups))
    if most < 2:
        return {}
    whole = [group for group in groups if len(group) == most]
    shares = [fmean(e.trajectory.success for e in group) for group in whole]
    origins = [group[0].origin for group in whole]
    kinds = {
        "always": [s == 1 for s in shares],
        "mixed": [0 < s < 1 for s in shares],
        "never": [s == 0 for s in shares],
    }
    return {f"{kind}@{most}": _rate(found, origins) for kind, found in kinds.items()}


def _reflecting(episodes: Sequence[Episode], voiced: Callable[[str], bool]) -> Estimate:
    """Return the share of episodes in which the model says a reflection; replayed steps do not
    count.
    """
    played = [e for e in episodes if e.trajectory_id]
    says = [any(voiced(step.reply) for step in e.trajectory.steps[e.cut :]) for e in played]
    return metrics.clustered_share([float(said) for said in says], [e.origin for e in played])


def by_instance(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """Return the episodes of each instance, in the order of their first episodes."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.instance.key, []).append(episode)
    return list(groups.values())


def _plain(value: float, n: int) -> Estimate:
    """Return a number that has no interval."""
    return Estimate(mean=value, low=math.nan, high=math.nan, n=n)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
