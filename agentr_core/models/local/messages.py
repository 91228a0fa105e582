"""Messages between a worker process and the process that started it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """An order to load a model: the arguments of `TransformersModel.load`."""

    path: Path
    dtype: str
    device: str
    max_batch: int
    context_length: int
    prefix_cache_bytes: int
    at: datetime | None

    def load(self) -> TransformersModel:
        """Return the model in this process. Raises as `TransformersModel.load`."""
        return TransformersModel.load(
            self.path,
            dtype=self.dtype,
            device=self.device,
            max_batch=self.max_batch,
            context_length=self.context_length,
            prefix_cache_bytes=self.prefix_cache_bytes,
            at=self.at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A worker's report about the model that it has loaded."""

    name: str
    fingerprint: str
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """An order to take over the weights of a file; the worker answers None."""

    weights: Path


@dataclass(frozen=True, slots=True)
class Working:
    """A worker's sign that the work under way goes on; the answer is still to come.

    `written` counts the tokens of all replies so far.
    """

    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The replies to a batch; the share of all prompt tokens so far that came from the cache, in
    [0, 1]; and the number of tokens of all replies so far.
    """

    replies: list[list[Generation]]
    cached_share: float
    written: int
