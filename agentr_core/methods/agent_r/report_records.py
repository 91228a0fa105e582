"""What a report says about judged paths and spliced revisions: frozen records, filled from the
store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentr_core.reports.records import Counts, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceSurvival:
    """The number of splices that still cleared alpha when played in the environment, and gained
    reward after the revision; `died` counts the others by reason.
    """

    tried: int
    survived: int
    died: Counts = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleAgreement:
    """The judge measured against an oracle that knows each step's true verdict.

    `precision` and `recall` are those of the class "bad"; None when undefined. `first_error` is the
    share of paths on which judge and oracle name the same first error.
    """

    accuracy: Estimate
    precision: float | None = None
    recall: float | None = None
    first_error: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRecord:
    """The record of the judge in an iteration. `verdicts` counts judged steps by class, unparsable
    ones included.
    """

    verdicts: Counts
    paths: int
    """Bad paths that were judged."""
    replies: int = 0
    unreadable: int = 0
    """Replies that were cut before their thought had an end: nothing of them counts."""
    model: str = ""
    """The judge; empty for the acting model."""
    no_error: int
    """Judged paths in which no step was found bad."""
    revision_lengths: Mapping[int, int] = field(default_factory=dict)
    """The numbers of spliced pairs by how many steps after the split the first error is (1: the
    first step after it); 0: in the steps that both paths share.
    """
    oracle: OracleAgreement | None = None
