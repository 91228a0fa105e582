"""The parts of a report page, independent of the output format: the input of both the HTML and the
Markdown renderer.

A `Section` is a heading, a sentence, and blocks. Text in blocks is plain text; `Figure.svg` alone
is markup, made by `plots` from numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
class Measured:
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


Cell = Link | str | Bar | Whisker | Measured | Meter | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `bar` and `whisker` columns are drawn, so text renderers leave them
    out.
    """

    title: str
    kind: ColumnKind = "number"

    @property
    def drawn(self) -> bool:
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
    """A drawing as inline SVG with its caption. `instead` is what renderers without drawings show,
    possibly nothing.
    """

    svg: str
    caption: str
    instead: tuple[Table | Paragraph, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar: `share` of the whole, in [0, 1]."""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar divided into parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A difference of success: `text` in signed points, its interval, and against what."""

    text: str
    interval: str
    against: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The headline number of a report with its differences. `reading` says which of them are beyond
    chance, if known.
    """

    value: str
    interval: str
    episodes: str
    deltas: tuple[Delta, ...]
    reading: str


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
    viewer: str = ""
    """The address of the viewer, whose pages show the whole sample and tree; empty for no links."""
    split: int
    """Steps that both paths share."""
    cut: int
    """Steps of the bad path that were kept, the first error included."""
    turns: tuple[Turn, ...]
    live_reward: float | None = None


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


def not_measured(key: str, title: str, why: str) -> Section:
    """Return a section that says in one line why it has nothing to show."""
    return Section(key, title, (Paragraph(f"Not measured: {why}."),))
