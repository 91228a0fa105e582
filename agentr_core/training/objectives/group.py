"""Reinforcement learning on groups of episodes that are sampled during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from agentr_core.fingerprint import later
from agentr_core.protocols import Environment
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.training.objectives.objective import Objective
from agentr_core.types import Trajectory


class GroupReward(Protocol):
    """A replacement for the episodes' own rewards within a group. It is a record, since it is part
    of the id of a checkpoint.
    """

    def rewards(self, group: Sequence[Trajectory], *, step: int, steps: int, env: Environment) -> list[float]:
        """Return the reward to use for each episode of a group in step `step`, from 1 to `steps`;
        `env` is the world of its instance.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(Objective):
    """Group-relative policy optimisation: samplers get the policy's weights after each step."""

    kind: Literal["grpo"] = "grpo"
    rows: ClassVar[Literal["episodes"]] = "episodes"
    grpo: GrpoConfig
    reward: GroupReward | None = later(None)  # noqa: RUF009
    """The reward that is compared within a group; None: the one that the environment, or its
    grader, gave.
    """
