"""What all sections of a recipe are made of: the kind of record, and the ranges of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

record = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
"""Makes a class a section: frozen, and unknown fields are refused."""

Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0, le=5)]
CutReplies = Literal["keep", "reject"]
"""What becomes of samples that train a reply which its token limit cut."""
