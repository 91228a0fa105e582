"""What all sections of a recipe share: the kind of record, and the ranges of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
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


def spare_numbers(section: object, plain: object, names: Sequence[str], phases: Sequence[str], kind: str) -> list[str]:
    """Return the fields, among some that have a number for each iteration of a kind, with more
    numbers than a run of these phases could ever have such iterations; defaults may have.
    """
    ever = phases.count(kind)
    if not ever or phases[-1] == kind:
        return []
    own = {name: getattr(section, name) for name in names}
    return [name for name, values in own.items() if len(values) > ever and values != getattr(plain, name)]


def _not_one(repeats: int) -> int:
    if repeats == 1:
        raise ValueError("1 would end every episode at its first reply; give 2 or more, or 0 for never")
    return repeats


Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Repeats = Annotated[Natural, AfterValidator(_not_one)]
"""The number of repeated replies that ends an episode; 0: it goes on."""
Temperature = Annotated[float, Field(ge=0, le=5)]
CutReplies = Literal["keep", "reject"]
"""What becomes of samples with a trained reply that was cut off at its token limit."""
