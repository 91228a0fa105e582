"""The objectives that a training minimises, as records: what each is called, the rows that it reads
and its settings.

They import neither torch nor TRL. `training.run` chooses the trainer of one that is trained in a
process of its own.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from agentr_core.fingerprint import absent, later
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """A quantity that a training minimises. `kind` is its tag; the other fields are its
    settings.
    """

    kind: str
    rows: ClassVar[Literal["samples", "pairs", "episodes"]]
    """The kind of the rows of its data."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return its settings by name: part of the id of a checkpoint, and stored with it. Fields
        that were added later are left out while they have their default.
        """
        left_out = {"kind"} | absent(self)
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised(Objective):
    """Supervised fine-tuning: the mean cross-entropy, in nats, of the labelled tokens of
    samples.
    """

    kind: Literal["sft"] = "sft"
    rows: ClassVar[Literal["samples"]] = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The loss of preference training, with the names of TRL. The reference is the model that the
    training starts from.
    """

    beta: float
    loss_type: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0
    ld_alpha: float | None = None
    max_chosen_drop: float | None = later(None)
    on_collapse: Literal["stop", "back"] = later("stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference(Objective):
    """Preference training: direct preference optimisation (arXiv 2305.18290) and its variants."""

    kind: Literal["dpo"] = "dpo"
    rows: ClassVar[Literal["pairs"]] = "pairs"
    preference: PreferenceLoss


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
    """Group-relative policy optimisation on episodes that are sampled during training: samplers get
    the policy's weights after each step.
    """

    kind: Literal["grpo"] = "grpo"
    rows: ClassVar[Literal["episodes"]] = "episodes"
    grpo: GrpoConfig
    reward: GroupReward | None = later(None)  # noqa: RUF009
    """The reward that is compared within a group; None: the one that the environment, or its
    grader, gave.
    """


Trainable = Annotated[Supervised | Preference, Field(discriminator="kind")]
"""Every objective that a `TrainingJob` may have, told apart by `kind` in its file. One that samples
while it trains belongs to its method and is not a member."""
