"""Reinforcement learning on groups of episodes, which are sampled while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from agentr_core.fingerprint import later
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.training.objectives.objective import Objective
from agentr_core.types import Trajectory


class GroupReward(Protocol):
    """What the episodes of a group are worth to a training, where that is not their own reward: a
    record, since it is part of the id of a checkpoint.
    """

    def rewards(self, group: Sequence[Trajectory], *, step: int, steps: int) -> list[float]:
        """Return the worth of each episode of a group in a step, from 1, of so many."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(Objective):
    """Group-relative policy optimisation: samplers get the policy's weights after each step."""

    kind: Literal["grpo"] = "grpo"
    rows: ClassVar[Literal["episodes"]] = "episodes"
    grpo: GrpoConfig
    reward: GroupReward | None = later(None)  # noqa: RUF009
    """What is compared within a group; None: the reward that the environment, or its grader,
    gave."""
