"""The revision test: can a model recover from the beginning of a failed episode of the base model?

Source: Agent-R (arXiv 2501.11425), section 4.3 and table 3. The cuts are drawn once, from the base
model's episodes, so that every model continues from the same states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.types import Instance, Rejection, Trajectory


def revision_plans(
    episodes: Sequence[tuple[int, Trajectory]], *, cuts: int, seed: int
) -> tuple[tuple[EpisodePlan, ...], tuple[Rejection, ...]]:
    """Return an episode to be played from each cut, and the failed trajectories that cannot be cut.

    A trajectory failed if its reward is 0. From each, up to `cuts` different numbers of steps are
    drawn; at least one step is kept and at least one is cut off, so that no prefix ends the
    episode.

    Args:
        episodes: the base model's, each with its number among those of its instance.
        seed: the cuts of an episode depend only on `seed`, the instance and that number.
    """
    plans: list[EpisodePlan] = []
    rejections: list[Rejection] = []
    for number, trajectory in episodes:
        key = trajectory.instance.key
        if trajectory.reward > 0:
            continue
        possible = range(1, len(trajectory.steps))
        if not possible:
            subject, detail = f"{key}#{number}", f"{len(trajectory.steps)} steps"
            rejections.append(Rejection(stage="revision-test", subject=subject, reason="too-short", detail=detail))
            continue
        rng = random.Random(derive_seed(seed, "cut", key, number))
        for cut in sorted(rng.sample(possible, min(cuts, len(possible)))):
            plans.append(
                EpisodePlan(
                    instance=trajectory.instance,
                    number=number,
                    seed=revision_seed(seed, trajectory.instance, number, cut),
                    prefix=trajectory.steps[:cut],
                )
            )
    return tuple(plans), tuple(rejections)


def revision_seed(seed: int, instance: Instance, number: int, cut: int) -> int:
    """Return the seed with which a model continues after `cut` steps of episode `number` of an
    instance.
    """
    return derive_seed(seed, "revision", instance.key, number, cut)
