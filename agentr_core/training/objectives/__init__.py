"""The objectives that a training minimises, one module for each kind: its settings, rows and
trainer.

A new kind that is trained in a process of its own is a module here and a member of `Trainable`; one
that samples while it trains belongs to its method and is not a member.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentr_core.training.objectives.group import GroupRelative, GroupReward
from agentr_core.training.objectives.objective import Objective, Offline
from agentr_core.training.objectives.preference import Preference, PreferenceLoss
from agentr_core.training.objectives.supervised import Supervised

Trainable = Annotated[Supervised | Preference, Field(discriminator="kind")]
"""Every objective that a `TrainingJob` may have, told apart by `kind` in its file."""

__all__ = [
    "GroupRelative",
    "GroupReward",
    "Objective",
    "Offline",
    "Preference",
    "PreferenceLoss",
    "Supervised",
    "Trainable",
]
