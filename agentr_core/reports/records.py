"""The data of a report: plain frozen records, filled from the store by the caller that asks for a
report.

Shares, rewards and scores are in [0, 1]; a renderer turns them into percent. Times are seconds.
Texts are as the model or the environment wrote them: renderers escape. A part that was not measured
is None, or an empty tuple, and its section of the report says so in one line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentr_core.reports.document import Section

BASE = 0
"""The iteration number of the model before any training."""
Counts = Mapping[str, int]
"""Counts by what was counted, in the order in which they are shown: slugs or names of classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over `n` episodes (or steps, or pairs) with its 95% interval.

    Raises:
        ValueError: a number is not finite.
    """

    value: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise ValueError(f"{self} is not finite: leave the estimate out (None) where nothing was measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthScore:
    """Held-out success on the instances of one difficulty class.

    `versus_base` is the difference to the base model on the same episodes.
    """

    depth: int
    success: Estimate
    versus_base: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAt:
    """The chance that one of `k` sampled episodes succeeds: of all instances, and by difficulty
    class.
    """

    k: int
    success: Estimate
    by_depth: tuple[DepthScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetScore:
    """The score of one model on one of the held-out sets, or in one of several worlds. `success.n`
    counts episodes.
    """

    name: str
    split: str
    instances: int
    success: Estimate
    versus_base: Estimate | None = None
    by_depth: tuple[DepthScore, ...] = ()
    pass_at: tuple[PassAt, ...] = ()
    """For k = 1, 2, 4, ..., where each instance was played several times."""
    reward: Estimate | None = None
    """Mean final reward; given for a world."""
    revision: Estimate | None = None
    """For a world: success when continuing from its failed prefixes."""
    revision_reward: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationScore:
    """The score of one model on the held-out instances. `iteration` 0 is the base model.

    `versus_base` is the difference of success to the base model on the same episodes.
    """

    iteration: int
    success: Estimate
    reward: Estimate
    versus_base: Estimate | None = None
    steps_to_success: float | None = None
    """Mean steps of the successful episodes; None when there are none."""
    by_depth: tuple[DepthScore, ...] = ()
    revision: Estimate | None = None
    """Success when continuing from failed prefixes of the base model (Agent-R, table 3)."""
    revision_reward: Estimate | None = None
    """Mean final reward of the episodes of `revision`."""
    loops: tuple[float, ...] = ()
    """For L = 1, 2, ...: mean positions in an episode where L actions repeat the L actions right
    before.
    """
    looping: float | None = None
    """Share of episodes in which some sequence came at least three times in a row."""
    lost: int = 0
    """Episodes, those of the revision test included, that failed for good."""
    lost_as: Literal["out", "zero"] = "out"
    """Whether lost episodes are left out of the means, or count as failures with reward 0."""
    sets: tuple[SetScore, ...] = ()
    """Every set that it played, first the one that the other fields describe; empty if the recipe
    has no other set.
    """
    worlds: tuple[SetScore, ...] = ()
    """The same held-out instances, world by world; empty where the recipe has one world."""

    def of_set(self, name: str) -> SetScore | None:
        """Return the score on a set or in a world, or None when it was not played."""
        return next((one for one in (*self.sets, *self.worlds) if one.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An evaluation of which only some episodes have ended. They say nothing of the others: those
    that are won end first.
    """

    iteration: int
    name: str
    """The set."""
    episodes: int
    planned: int | None
    """The number of all its episodes; None until another model has played them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """The model with which the run goes on after an iteration, the best so far on a development
    set.
    """

    iteration: int
    """The iteration that made it; 0 is the base model."""
    development: str
    success: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FunnelStage:
    """The number of items that passed a stage of data construction, and why the others did not."""

    name: str
    count: int
    rejected: Counts = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The tokens that the served model of one role read and wrote. `prompt` counts once for each of
    the HTTP `requests`.

    `cost` is in the currency of the recipe's prices; None if it has none.
    """

    role: str
    model: str
    requests: int
    prompt: int
    completion: int
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens read and written by the models, and tokens of the dataset that carry loss, by class of
    sample or turn.
    """

    prompt: int
    completion: int
    trained: Counts = field(default_factory=dict)
    in_training: int = 0
    """Tokens that carried loss in training, counted anew in each pass over the dataset; 0 before
    the training has ended.
    """
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By purpose (collected, judged, evaluated): the replies whose reason for ending is known, and
    those of them that ran into their token limit.
    """
    unreadable: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By role: the replies of helpers, and those of them that were cut before their thought had an
    end, so that nothing of them counted.
    """
    bills: tuple[Bill, ...] = ()

    @property
    def all_trained(self) -> int:
        """Tokens that carried loss in training or, before it has ended, in one pass."""
        return self.in_training or sum(self.trained.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCount:
    """The number of tree paths and of held-out episodes that ended for one reason."""

    reason: str
    collected: int
    evaluated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCount:
    """Exceptions of one class in one phase; for `lost` episodes or trees, no retry healed it."""

    error: str
    phase: str
    count: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The errors of an iteration: refused actions by the words of the refusal, why episodes
    stopped, faults of the machinery.
    """

    refused: Counts = field(default_factory=dict)
    stops: tuple[StopCount, ...] = ()
    faults: tuple[FaultCount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """The report of one iteration of one run.

    `scores` holds every model evaluated to the end so far, the base model and this iteration among
    them. `versus_base` and `versus_previous` estimate the difference of success, this iteration
    minus the other, on the same instances.
    """

    recipe_name: str
    run_id: str
    iteration: int
    date: str
    environment: str
    model: str
    roles: Mapping[str, str] = field(default_factory=dict)
    """Models that took over a role from the acting one, by role."""
    scores: tuple[IterationScore, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    """Evaluations that go on or were interrupted; they are in no score."""
    versus_base: Estimate | None = None
    versus_previous: Estimate | None = None
    interval_method: str = ""
    """How the intervals were computed, as a phrase for the footnote."""
    promoted: Promoted | None = None
    """None if the run goes on with the last model."""
    funnel_title: str = "Training data"
    funnel: tuple[FunnelStage, ...] = ()
    worlds: Mapping[str, Counts] = field(default_factory=dict)
    """What was made in each world, by kind; empty if the recipe has one world."""
    data: tuple[Section, ...] = ()
    """The method's sections about the data of the iteration, placed after the funnel."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds by activity: generate, environment, train, store, other."""
    tokens: TokenCounts | None = None
    errors: ErrorRecord | None = None
    samples: tuple[Section, ...] = ()
    """The method's sections with its samples, placed before the recipe."""
    run: tuple[Section, ...] = ()
    """The method's sections on the page of the whole run, up to this iteration."""
    recipe_yaml: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Of the checkpoint, its parent, the dataset and the weights, by these names."""
    viewer: str = ""
    """Where `agentr view` shows the workspace; empty for a page without links there."""
    rows: Counts = field(default_factory=dict)
    """The number of rows of the iteration in each list of the viewer."""

    def score(self, iteration: int) -> IterationScore | None:
        """Return the score of an iteration, or None when it was not evaluated."""
        return next((score for score in self.scores if score.iteration == iteration), None)


def report_name(iteration: int) -> str:
    """Return the file name of an iteration's report without its ending, `iteration-02`."""
    return f"iteration-{iteration:02d}"


def of_one_run(reports: Sequence[IterationReport]) -> tuple[IterationReport, ...]:
    """Return reports in the order of their iterations. Raises `ValueError` unless they are of one
    run.
    """
    runs = sorted({report.run_id for report in reports})
    if len(runs) != 1:
        raise ValueError(f"expected reports of one run, got {', '.join(runs) or 'none'}: call once for each run")
    return tuple(sorted(reports, key=lambda report: report.iteration))
