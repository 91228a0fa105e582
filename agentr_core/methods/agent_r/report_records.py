"""What a report says about judged paths and spliced revisions: frozen records, filled from the
store.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.reports.records import Estimate, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceSurvival:
    """The number of splices that still cleared alpha when played in the environment, and gained
    reward after the revision; `died` counts the others by reason.
    """

    tried: int
    survived: int
    died: tuple[Tally, ...] = ()


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
class LengthCount:
    """The number of spliced pairs whose first error is `steps` steps after the split (1: the first
    step after it).

    0 stands for an error in the steps that both paths share.
    """

    steps: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRecord:
    """The record of the judge in an iteration. `verdicts` counts judged steps by class, unparsable
    ones included.
    """

    verdicts: tuple[Tally, ...]
    paths: int
    """Bad paths that were judged."""
    model: str = ""
    """The judge; empty for the acting model."""
    no_error: int
    """Judged paths in which no step was found bad."""
    revision_lengths: tuple[LengthCount, ...] = ()
    oracle: OracleAgreement | None = None
