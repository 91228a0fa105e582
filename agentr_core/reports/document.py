"""The parts of a report page, independent of the output format: the input of both the HTML and the
Markdown renderer.

A `Section` is a heading, a sentence, and blocks. Text in blocks is plain text; `Figure.svg` alone
is markup, made by `plots` from numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote, urlencode

from agentr_core.types import Role

ColumnKind = Literal["text", "number", "code", "meter", "bar", "whisker"]
RowTone = Literal["", "strong", "minor"]
TurnPart = Literal["opening", "shared", "bad", "revision", "good"]
"""Which part of a revision sample a turn belongs to: instruction and first observation; steps that
the good and the bad path share; bad steps up to the first error; the reflection and its answer; the
remaining steps of the good path."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar that fills `share` of its cell, in [0, 1]."""

    share: float


@dataclass(frozen=True, slots=True)
class Whisker:
    """A dot with its interval on a scale from 0 to 1."""

    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class EstimateText:
    """A number with its interval, both as text; `interval` is empty if there is only one value."""

    text: str
    interval: str = ""

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.text} ({self.interval})" if self.interval else self.text


@dataclass(frozen=True, slots=True)
class Meter:
    """A number with its interval as text, over a bar that fills `share` of the cell."""

    text: str
    note: str
    share: float


@dataclass(frozen=True, slots=True)
class Link:
    """A text that links to an address; with an empty address it is no link."""

    text: str
    address: str

    def __str__(self) -> str:
        """Return the text alone."""
        return self.text


Cell = Link | str | Bar | Whisker | EstimateText | Meter | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `bar` and `whisker` columns are drawn, so text renderers leave them
    out.
    """

    title: str
    kind: ColumnKind = "number"

    @property
    def is_drawn(self) -> bool:
        """Whether the column repeats as a drawing what other columns say in numbers."""
        return self.kind in ("bar", "whisker")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: as many cells as the table has columns."""

    cells: tuple[Cell, ...]
    tone: RowTone = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing as inline SVG with its caption. `fallback` is what renderers without drawings show,
    possibly nothing.
    """

    svg: str
    caption: str
    fallback: tuple[Table | Paragraph, ...] = ()


@dataclass(frozen=True, slots=True)
class StackPart:
    """One part of a stacked bar: `share` of the whole, in [0, 1]."""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar divided into parts."""

    parts: tuple[StackPart, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A difference of success: `text` in signed points, its interval, and against what."""

    text: str
    interval: str
    against: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The headline number of a report with its differences. `conclusion` says which of them are
    beyond chance, if known.
    """

    value: str
    interval: str
    episodes: str
    deltas: tuple[Delta, ...]
    conclusion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a transcript. `verdict` and `judge_reply` are set on steps that the judge
    saw.
    """

    role: Role
    text: str
    part: TurnPart
    train: bool = False
    first_error: bool = False
    verdict: str = ""
    judge_reply: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionExample:
    """One revision sample as it is trained on. `live_reward` is the reward of the verified splice,
    if it was played.
    """

    sample_id: str
    instance: str
    tree_id: str
    good_reward: float
    bad_reward: float
    viewer_url: str = ""
    """The address of the viewer, whose pages show the whole sample and tree; empty for no links."""
    split: int
    """Steps that both paths share."""
    cut: int
    """Steps of the bad path that were kept, the first error included unless it was rolled back."""
    turns: tuple[Turn, ...]
    live_reward: float | None = None
    diagnosis: str = ""
    """The text given to the model that continued after the rollback; it is not trained on."""


@dataclass(frozen=True, slots=True)
class Transcripts:
    """Revision samples, turn by turn."""

    examples: tuple[RevisionExample, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Preformatted text that can be folded away."""

    title: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Legend:
    """The names of the lines in the preceding figure, each with its mark."""

    names: tuple[str, ...]


Block = Legend | Table | Figure | Paragraph | Stack | Headline | Transcripts | Listing


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its contents. `note` says how to read the numbers."""

    key: str
    title: str
    blocks: tuple[Block, ...]
    note: str = ""


def unmeasured_section(key: str, title: str, why: str) -> Section:
    """Return a section that says in one line why it has nothing to show."""
    return Section(key, title, (Paragraph(f"Not measured: {why}."),))


# The data of a report: plain frozen records, filled from the store by the caller that asks for a
# report.
#
# Shares, rewards and scores are in [0, 1]; a renderer turns them into percent. Times are seconds.
# Texts are as the model or the environment wrote them: renderers escape. A part that was not
# measured is None, or an empty tuple, and its section of the report says so in one line.

BASE_ITERATION = 0
"""The iteration number of the model before any training."""
Counts = Mapping[str, int]
"""Counts by name, a slug or the name of a class, in the order in which they are shown."""


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
    """pass@k, the chance that at least one of `k` sampled episodes of an instance succeeds: over
    all instances, and by difficulty class.
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
    name: str = ""
    """The name of a model that the run only evaluates; empty where it goes by its iteration."""
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
    num_lost: int = 0
    """Episodes, those of the revision test included, that failed for good."""
    lost_treatment: Literal["out", "zero"] = "out"
    """Whether lost episodes are left out of the means, or count as failures with reward 0."""
    sets: tuple[SetScore, ...] = ()
    """Every set that the model played, first the one that the other fields describe; empty if the
    recipe has only that one.
    """
    worlds: tuple[SetScore, ...] = ()
    """The same held-out instances, world by world; empty where the recipe has one world."""

    def score_of_set(self, name: str) -> SetScore | None:
        """Return the score on a set or in a world, or None when it was not played."""
        return next((score for score in (*self.sets, *self.worlds) if score.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedEvaluation:
    """An evaluation of which only some episodes have ended. It has no score, which would be biased:
    episodes that succeed end first.
    """

    iteration: int
    name: str
    """The name of the evaluation set."""
    num_episodes: int
    num_planned: int | None
    """The number of all its episodes; None until the base model has played them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedModel:
    """The model with which the run goes on after an iteration, the best so far on a development
    set.
    """

    iteration: int
    """The iteration that made it; 0 is the base model."""
    development_set: str
    success: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FunnelStage:
    """The number of items that passed a stage of data construction, and why the others did not."""

    name: str
    count: int
    rejected_by_reason: Counts = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
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
    trained_by_class: Counts = field(default_factory=dict)
    in_training: int = 0
    """Tokens that carried loss in training, counted anew in each pass over the dataset; 0 before
    the training has ended.
    """
    cut_by_purpose: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By purpose (collected, judged, evaluated): the replies whose reason for ending is known, and
    those of them that ran into their token limit.
    """
    unreadable_by_role: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By role: the replies of helper models, and those of them that were cut off within their
    reasoning, so that they had no answer.
    """
    usages: tuple[ModelUsage, ...] = ()

    @property
    def num_trained(self) -> int:
        """Tokens that carried loss in training or, before it has ended, in one pass."""
        return self.in_training or sum(self.trained_by_class.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCount:
    """The number of tree paths and of held-out episodes that ended for one reason."""

    reason: str
    num_collected: int
    num_evaluated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCount:
    """Exceptions of one class in one phase. `num_lost` episodes or trees failed for good, since
    retries did not help.
    """

    error: str
    phase: str
    count: int
    num_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The errors of an iteration: the number of actions that the environment refused, by the first
    words of the refusal; why episodes stopped; and exceptions.
    """

    refusals_by_message: Counts = field(default_factory=dict)
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
    unfinished_evaluations: tuple[UnfinishedEvaluation, ...] = ()
    """Evaluations that go on or were interrupted; they are in no score."""
    versus_base: Estimate | None = None
    versus_previous: Estimate | None = None
    interval_method: str = ""
    """How the intervals were computed, as a phrase for the footnote."""
    promoted: PromotedModel | None = None
    """None if the run goes on with the last model."""
    alarm_sections: tuple[Section, ...] = ()
    """The section on the alarms of the iteration; empty if there were none."""
    failure_sections: tuple[Section, ...] = ()
    """The sections on episodes that failed, and on those that were scored again; empty if there
    were none.
    """
    funnel_title: str = "Training data"
    funnel: tuple[FunnelStage, ...] = ()
    item_counts_by_world: Mapping[str, Counts] = field(default_factory=dict)
    """How many items of each kind were made, by world; empty if the recipe has one world."""
    data_sections: tuple[Section, ...] = ()
    """The method's sections about the data of the iteration, placed after the funnel."""
    seconds_by_activity: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds by activity: generate, environment, train, store, other."""
    tokens: TokenCounts | None = None
    errors: ErrorRecord | None = None
    sample_sections: tuple[Section, ...] = ()
    """The method's sections with its samples, placed before the recipe."""
    run_sections: tuple[Section, ...] = ()
    """The method's sections on the page of the whole run, up to this iteration."""
    recipe_yaml: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the checkpoint, its parent, the dataset and the weights, by these names."""
    viewer_url: str = ""
    """Where `agentr view` shows the workspace; empty for a page without links there."""
    num_rows_by_list: Counts = field(default_factory=dict)
    """The number of rows of the iteration in each list of the viewer."""

    def score(self, iteration: int) -> IterationScore | None:
        """Return the score of an iteration, or None when it was not evaluated."""
        return next((score for score in self.scores if score.iteration == iteration), None)


def report_name(iteration: int) -> str:
    """Return the file name of an iteration's report without its ending, `iteration-02`."""
    return f"iteration-{iteration:02d}"


def reports_of_one_run(reports: Sequence[IterationReport]) -> tuple[IterationReport, ...]:
    """Return reports in the order of their iterations. Raises `ValueError` unless they are of one
    run.
    """
    runs = sorted({report.run_id for report in reports})
    if len(runs) != 1:
        raise ValueError(f"expected reports of one run, got {', '.join(runs) or 'none'}: call once for each run")
    return tuple(sorted(reports, key=lambda report: report.iteration))


# The addresses of the viewer's pages, which do not change, so that others may link to them.

VIEWER_URL = "http://127.0.0.1:4280"
"""Where `agentr view` shows a workspace by default: reports link there."""


def page_path(kind: str, key: str) -> str:
    """Return the path of the page that shows a row of the store, `/KIND/ID`. The `key` of a node is
    `TREE#NUMBER`.
    """
    return f"/{kind}/{quote(key, safe='').replace('%23', '/')}"


def report_path(run_id: str, name: str) -> str:
    """Return the path of a page among the reports of a run, such as `iteration-02`."""
    return f"/report/{run_id}/{name}.html"


def stage_path(run_id: str, iteration: int, stage: str) -> str:
    """Return the path of the page of a stage."""
    return f"/stage/{quote(run_id, safe='')}/{iteration}/{quote(stage, safe='')}"


def group_path(iteration_id: str, step: int, number: int) -> str:
    """Return the path of the page of a group of episodes in a step of group RL."""
    return f"/group/{quote(iteration_id, safe='')}/{step}/{number}"


def list_path(name: str, **filters: Any) -> str:
    """Return the path of a list, narrowed by filters; filters that are None are left out."""
    return with_query(f"/{name}", {key: value for key, value in filters.items() if value is not None})


def with_query(path: str, query: Mapping[str, Any]) -> str:
    """Return a path followed by a query, percent-encoded; the path alone if the query is empty."""
    return f"{path}?{urlencode(query)}" if query else path
