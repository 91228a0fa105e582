"""The job of making a base model, and its reports while it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from agentr_core.fingerprint import canonical, fingerprint
from agentr_core.models.files import read_json
from agentr_core.recipes.training import BaseConfig
from agentr_core.training.job import Fault, WorkFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseJob:
    """A base model to be made: the section `base` of a recipe, a seed, and the folder of unfinished
    work.
    """

    config: BaseConfig
    seed: int
    folder: Path

    @property
    def key(self) -> str:
        """The id of all that decides the weights; where the model goes is no part of it."""
        return fingerprint("base-model", self._made_of, self.seed)

    @property
    def output(self) -> Path:
        """The directory of the finished model, which appears all at once."""
        return Path(self.config.output)

    @property
    def work(self) -> WorkFolder:
        """The folder of this job's unfinished work."""
        return WorkFolder(self.folder / self.key)

    @property
    def record(self) -> dict[str, Any]:
        """What the finished model's `recipe.json` says it was made of."""
        return {"key": self.key, "seed": self.seed, "base": json.loads(canonical(self._made_of))}

    def is_made(self) -> bool:
        """Return whether the model at `output` is the one that this job makes."""
        file = record_file(self.output)
        return file.exists() and bool(read_json(file).get("key") == self.key)

    @property
    def _made_of(self) -> BaseConfig:
        return replace(self.config, output="")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseStep:
    """The progress of a base model's training; `loss` is a mean over some steps, in nats a
    token.
    """

    step: int
    total_steps: int
    loss: float


def record_file(model_dir: Path) -> Path:
    """Return the file in a base model's directory that says what it was made of."""
    return model_dir / "recipe.json"


JOB: TypeAdapter[BaseJob] = TypeAdapter(BaseJob)
EVENT: TypeAdapter[BaseStep | Fault] = TypeAdapter(BaseStep | Fault)
