"""What all sections of a recipe share: the kind of record, and the ranges of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(section: type[T]) -> type[T]:
    """Return a class as a section: a frozen dataclass that refuses unknown fields."""
    made = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(section)
    return cast("type[T]", made)


def in_iteration(values: Sequence[T], iteration: int) -> T:
    """Return the value for an iteration, counted from 1; the last one is for all later ones."""
    return values[min(iteration, len(values)) - 1]


def repeats_faults(field: str, repeats: int) -> list[str]:
    """Return what is wrong with the number of repeated replies that ends an episode."""
    told = f"{field}: 1 would end every episode at its first reply; give 2 or more, or 0 for never"
    return [told] if repeats == 1 else []


Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0, le=5)]
CutReplies = Literal["keep", "reject"]
"""What becomes of samples with a trained reply that was cut off at its token limit."""
