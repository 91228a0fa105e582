"""Groups that begin in the middle: which of a step's instances go on from a failed episode or the
expert's, and after which of its steps.

Agent-R splices a revision onto the beginning of a bad path and trains on it (arXiv 2501.11425,
section 3.2). Here the policy itself goes on from such a beginning, as in the revision test, and is
rewarded for the outcome. Where it never wins, it goes on from a beginning of the expert's episode:
the later that ends, the less is left to find (arXiv 2402.05808).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentr_core.fingerprint import derive_seed
from agentr_core.types import Instance, Step, Trajectory

Operator = Literal["revision", "continuation"]
"""Of a failed episode, or of the expert's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The steps that the episodes of a group go on from: the first ones of trajectory `parent`, an
    id; without any, they begin at the start. `operator` says whose trajectory it is.
    """

    steps: tuple[Step, ...] = ()
    parent: str = ""
    operator: Operator = "revision"


def revisited(
    instances: Sequence[Instance], failed: Mapping[str, Sequence[str]], *, share: float, seed: int
) -> dict[str, str]:
    """Return the failed episodes to go on from, by instance key: one for each of at most a `share`
    of all `instances`, drawn by the seed.

    At least one instance is always left out, so that each step has episodes from the start.

    Args:
        failed: the ids of failed episodes with at least two steps, by the key of their instance, in
            the order in which they were planned.
    """
    able = sorted({instance.key for instance in instances if failed.get(instance.key)})
    rng = random.Random(seed)
    most = min(round(share * len(instances)), len(instances) - 1)
    chosen = rng.sample(able, min(len(able), most))
    return {key: rng.choice(failed[key]) for key in sorted(chosen)}


def beginning(key: str, trajectory: Trajectory, *, seed: int, operator: Operator = "revision") -> Beginning:
    """Return a beginning of the trajectory with id `key`, which has at least two steps: at least
    one is kept and at least one is cut off, so that no beginning ends the episode. Where it is cut
    is drawn by the seed and the instance.
    """
    cut = random.Random(derive_seed(seed, "cut", trajectory.instance.key)).randrange(1, len(trajectory.steps))
    return Beginning(steps=trajectory.steps[:cut], parent=key, operator=operator)
