"""Preference training: direct preference optimisation (arXiv 2305.18290) and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from agentr_core.fingerprint import later
from agentr_core.training.objectives.objective import Offline, TrainerModule

if TYPE_CHECKING:
    from agentr_core.training.packing import TokenPair


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
class Preference(Offline):
    """Preference training, with TRL's DPOTrainer."""

    kind: Literal["dpo"] = "dpo"
    rows: ClassVar[Literal["pairs"]] = "pairs"
    preference: PreferenceLoss

    def read(self, file: Path, *, vocabulary: int, context: int) -> Sequence[TokenPair]:
        """Return the checked pairs of a file that has the columns of samples for each side, with
        the prefixes `chosen_` and `rejected_`.
        """
        from agentr_core.training.token_rows import read_pairs

        return read_pairs(file, vocabulary=vocabulary, context=context)

    def trainer(self) -> TrainerModule:
        """Return `training.dpo`."""
        from agentr_core.training import dpo

        return dpo
