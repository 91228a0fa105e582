"""Samples and preferences that are trained on, where they come from, and what was rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentr_core.types.conversation import Message
from agentr_core.types.episodes import Instance


class SampleKind(StrEnum):
    """Where a training sample comes from: the kinds of the shipped methods.

    The list is open: `Sample.kind` is any short word, and a method may have kinds of its own.
    """

    REVISION = "revision"
    GOOD = "good"
    GENERAL = "general"
    EXPERT = "expert"
    JUDGE = "judge"
    CHOSEN = "chosen"
    REJECTED = "rejected"


class PreferenceCase(StrEnum):
    """What made one side of a preference better than the other."""

    LOSE = "lose"
    """The policy got less reward than the expert."""
    WIN = "win"
    """The policy got more reward than the expert."""
    STEP = "step"
    """The expert and the policy took different steps from the same state, and one of them got more
    reward in the end.
    """
    OWN = "own"
    """The best of the policy's episodes against its worst."""
    TREE = "tree"
    """Two branches that leave one node of a search tree."""
    FILE = "file"
    """A ready pair from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a sample comes from: ids in the store, enough to walk back to every node, verdict and
    seed.
    """

    tree_id: str = ""
    good_leaf: int | None = None
    bad_leaf: int | None = None
    split: int | None = None
    """Steps shared by both paths."""
    cut: int | None = None
    """Steps of the bad path that were kept, the first error included."""
    good_reward: float | None = None
    bad_reward: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation to train on. Only turns with `train=True` carry loss."""

    kind: str
    """A `SampleKind`, or a word of the method that made it."""
    messages: tuple[Message, ...]
    instance: Instance | None
    provenance: Provenance = Provenance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A better and a worse continuation of the same conversation.

    The untrained turns before the first trained one are the same in both samples, and both end with
    a trained turn. Rewards are those of the whole trajectories, in [0, 1]; None if a file does not
    give them. `dropped` counts the steps that were cut off the end of the rejected side.
    """

    case: PreferenceCase
    chosen: Sample
    rejected: Sample
    chosen_reward: float | None
    rejected_reward: float | None
    dropped: int = 0

    @property
    def margin(self) -> float | None:
        """How much more reward the chosen side has."""
        if self.chosen_reward is None or self.rejected_reward is None:
            return None
        return self.chosen_reward - self.rejected_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Something that a filter rejected. `subject` is its id or key; `reason` is a short slug."""

    stage: str
    subject: str
    reason: str
    detail: str = ""
