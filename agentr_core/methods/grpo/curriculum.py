"""Which instances a step draws: those whose groups are likely to have contrast, judging by their
latest episodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentr_core.types import Instance

_WON, _MISSED = 0.5, 0.1
"""Wins and losses that every instance begins with. Most instances are hopeless or mastered, and the
policy improves: of groups of eight, a third were mixed where the instance had always been lost
before, and 4% where it had always been won (`deployments/LOG.md`, "which instances have contrast").
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRewards:
    """Rewards of an instance, won and missed, summed over its episodes; earlier ones count less."""

    won: float = 0.0
    missed: float = 0.0

    def after(self, *, episodes: int, reward: float, memory: float) -> PastRewards:
        """Return the past rewards after a group with a mean reward in [0, 1]; earlier groups count
        `memory` times as much.
        """
        return PastRewards(
            won=memory * self.won + episodes * reward, missed=memory * self.missed + episodes * (1.0 - reward)
        )


def contrast(rate: float, size: int) -> float:
    """Return the chance, in [0, 1), that some of `size` episodes succeed and some fail at this rate
    of success.
    """
    return 1.0 - rate**size - (1.0 - rate) ** size


def choose(
    instances: Sequence[Instance],
    known: Mapping[str, PastRewards] | None,
    *,
    count: int,
    size: int,
    seed: int,
    avoid: Collection[str] = (),
) -> list[Instance]:
    """Return `count` instances, starting with those whose groups of `size` episodes are likely to
    have contrast.

    A rate of success is drawn for each, from the Beta distribution given by its tally and a prior,
    and the highest chances of contrast win (Thompson sampling). So an instance of which little is
    known gets its turn too, and so does one that was always lost so far, since the policy improves.
    If `known` is None, all have the same chance.

    Instances to `avoid`, by key, are chosen only after all others; if there are fewer than `count`
    instances, they repeat.
    """
    random = np.random.default_rng(seed)
    if known is None:
        scores = random.random(len(instances))
    else:
        found = [known.get(instance.key, PastRewards()) for instance in instances]
        rates = random.beta([_WON + tally.won for tally in found], [_MISSED + tally.missed for tally in found])
        scores = np.array([contrast(rate, size) for rate in rates])
    score_of = {instance.key: score for instance, score in zip(instances, scores, strict=True)}
    order = sorted(instances, key=lambda instance: (instance.key in avoid, -score_of[instance.key], instance.key))
    return [order[position % len(order)] for position in range(count)]


def lost(instances: Iterable[Instance], known: Mapping[str, PastRewards]) -> list[Instance]:
    """Return the instances that were played and never earned any reward."""
    return [instance for instance in instances if instance.key in known and not known[instance.key].won]


def past_rewards(outcomes: Iterable[tuple[str, int, float]], *, memory: float) -> dict[str, PastRewards]:
    """Return the tally of each instance after groups, each given in order as instance, episodes and
    mean reward.
    """
    found: dict[str, PastRewards] = {}
    for key, episodes, reward in outcomes:
        found[key] = found.get(key, PastRewards()).after(episodes=episodes, reward=reward, memory=memory)
    return found
