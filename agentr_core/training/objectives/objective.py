"""The interface of all kinds of objectives.

These records import neither torch nor TRL: a trainer is imported only when requested.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from agentr_core.fingerprint import absent

if TYPE_CHECKING:
    from agentr_core.training.job import TrainingJob, TrainingStep
    from agentr_core.training.parent import Parent
    from agentr_core.training.plan import Plan


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


class Offline(Objective):
    """An objective on a dataset that exists before the training begins."""

    __slots__ = ()

    @abstractmethod
    def read(self, file: Path, *, vocabulary: int, context: int) -> Sequence[Any]:
        """Return the checked rows of a dataset. Arguments and errors are those of
        `token_rows.read_rows`.
        """

    @abstractmethod
    def trainer(self) -> TrainerModule:
        """Import and return the module with its trainer."""


class TrainerModule(Protocol):
    """A module that makes a Hugging Face Trainer which follows a plan of steps."""

    def arguments(self, job: TrainingJob, *, steps: int) -> Any:
        """Return the Trainer's arguments for a job of `steps` optimizer steps."""

    def make_trainer(
        self,
        job: TrainingJob,
        plan: Plan,
        rows: Sequence[Any],
        *,
        parent: Parent,
        settings: Any,
        tell: Callable[[TrainingStep], None],
    ) -> Any:
        """Return the trainer of a job; `settings` are its `arguments`."""
