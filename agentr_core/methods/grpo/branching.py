"""Episodes that branch where the policy becomes less sure than it was at the start.

A group begins with a few episodes. After each observation an episode may branch: another one is
played from the same steps on. The chance grows with the entropy of the preceding reply minus that
of the first reply. Episodes that the group still lacks in the end are played from the start.
Source: ARPO (arXiv 2507.19849).

Entropies are estimated from the log-probabilities of the tokens that were drawn: minus their sum
is, on average, the entropy of the policy's whole distribution. The published code sums p * log p
over the ten likeliest tokens instead.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.grpo import BranchingConfig
from agentr_core.types import Step, Trajectory

OPERATOR = "branch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An episode of a group that was played, with the id of its trajectory.

    The first step of a branch is its parent's, and so is the entropy with which later ones are
    compared.
    """

    key: str
    plan: EpisodePlan
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The place where a member branches: after the first `position` of its steps."""

    parent: Member
    position: int

    @property
    def prefix(self) -> tuple[Step, ...]:
        """The steps that the branch goes on from."""
        return self.parent.trajectory.steps[: self.position]


def entropy(step: Step, branching: BranchingConfig, vocabulary: int) -> float:
    """Return an estimate of the entropy of a reply's first tokens, summed over them, in units of
    `ln(vocabulary)`.

    Raises `DataFault` if the reply has no log-probabilities.
    """
    if step.logprobs is None:
        raise DataFault(f"the reply {step.reply[:60]!r} has no log-probabilities, so its entropy is not known")
    return -sum(step.logprobs[: branching.entropy_tokens]) / math.log(vocabulary)


def chance(rise: float, branching: BranchingConfig) -> float:
    """Return the probability of a branch after a reply whose entropy is `rise` above that of the
    first one.
    """
    return min(1.0, max(0.0, branching.branch_probability + branching.entropy_weight * rise))


def forks(
    members: Sequence[Member], branching: BranchingConfig, vocabulary: int, *, room: int, given: int = 0
) -> list[Fork]:
    """Return where members branch: at most `room` places, the earliest in the episodes first.

    Each observation of a member's own, as opposed to its parent's, gives one chance to branch,
    which a seed of its own decides. The first `given` steps of each were not sampled for the group.
    """
    tried = [
        Fork(parent=one, position=position)
        for one in members
        for position in _open(one)
        if _branches(one, position, branching, vocabulary, given)
    ]
    return sorted(tried, key=lambda fork: (fork.position, fork.parent.plan.number))[:room]


def _open(one: Member) -> Iterator[int]:
    """Yield the numbers of steps after which a member got an observation of its own and went on."""
    steps = one.trajectory.steps
    for position in range(len(one.plan.prefix) + 1, len(steps)):
        if steps[position - 1].observation:
            yield position


def _branches(one: Member, position: int, branching: BranchingConfig, vocabulary: int, given: int) -> bool:
    steps = one.trajectory.steps
    rise = entropy(steps[position - 1], branching, vocabulary) - entropy(steps[given], branching, vocabulary)
    draw = random.Random(derive_seed(one.plan.seed, OPERATOR, position)).random()
    return draw < chance(rise, branching)
