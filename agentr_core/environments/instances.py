"""The instances of a split, made when they are asked for: a split may hold billions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentr_core.types import Instance


class Instances(Sequence[Instance]):
    """The instances of one split of an environment, in the order of `indices`."""

    def __init__(self, environment: str, split: str, indices: Sequence[int]) -> None:
        self._environment = environment
        self._split = split
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, one: object) -> bool:
        return (
            isinstance(one, Instance)
            and (one.environment, one.split) == (self._environment, self._split)
            and one.index in self._indices
        )

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return Instances(self._environment, self._split, self._indices[position])
        return Instance(environment=self._environment, split=self._split, index=self._indices[position])
