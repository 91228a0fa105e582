"""Pages of lists: the contents and links of their columns, filters, and paging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from agentr_core.reports import document, wording
from agentr_core.store.database import Store
from agentr_core.store.queries.listings import LISTINGS, choices, listed
from agentr_core.texts import goal

PAGE_ROWS: Final = 50
Record = Mapping[str, Any]


class Cell(NamedTuple):
    """The contents of a cell: a text, and the address that it links to, if any."""

    text: str
    href: str | None = None
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, the query column that it shows, how it is shown, and the links of its
    cells.
    """

    title: str
    name: str
    kind: str = "number"
    leads: Callable[[Record], str | None] = lambda record: None


@dataclass(frozen=True, slots=True)
class Shown:
    """A list as a page shows it."""

    title: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """The contents of the page of a list."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    total: int
    first: int
    """The number of the first row shown, from 1."""
    filters: dict[str, str]
    choices: dict[str, list[str]]
    """The values of the filters that have few."""
    free: tuple[str, ...]
    """Filters that are typed in."""
    previous: str | None
    following: str | None


def _own(kind: str, column: str) -> Callable[[Record], str | None]:
    return lambda record: document.page_of(kind, record[column])


def _instance(name: str) -> Column:
    return Column("Instance", "instance_id", "code", lambda r: document.listing(name, instance=r["instance_id"]))


_GOAL = Column("Goal", "first_observation", "goal")
_ITERATION = Column("Iteration", "iteration")
_DEPTH = Column("Depth", "depth")
SHOWN: Mapping[str, Shown] = {
    "trajectories": Shown(
        "Trajectories",
        (
            Column("Trajectory", "trajectory_id", "code", _own("trajectory", "trajectory_id")),
            _GOAL,
            _instance("trajectories"),
            _DEPTH,
            Column("Source", "source", "text"),
            _ITERATION,
            Column("Success", "success", "flag"),
            Column("Reward", "reward"),
            Column("Steps", "num_steps"),
            Column("Ended by", "stop", "text"),
        ),
    ),
    "trees": Shown(
        "Search trees",
        (
            Column("Tree", "tree_id", "code", _own("tree", "tree_id")),
            _GOAL,
            _instance("trees"),
            _DEPTH,
            _ITERATION,
            Column("Nodes", "nodes"),
            Column("Dives", "dives_done"),
            Column("Wins", "wins"),
            Column("Best reward", "best"),
            Column("Finished", "finished", "flag"),
        ),
    ),
    "pairs": Shown(
        "Pairs of a good and a bad path",
        (
            Column("Pair", "pair_id", "code", _own("pair", "pair_id")),
            _GOAL,
            _instance("pairs"),
            _ITERATION,
            Column("Good reward", "good_reward"),
            Column("Bad reward", "bad_reward"),
            Column("Shared steps", "shared_steps"),
            Column("First error", "first_error"),
            Column("Spliced", "spliced", "flag"),
        ),
    ),
    "samples": Shown(
        "Samples",
        (
            Column("Sample", "sample_id", "code", _own("sample", "sample_id")),
            Column("Kind", "kind", "text"),
            _instance("samples"),
            _ITERATION,
            Column("Tokens", "num_tokens"),
            Column("Trained", "num_trained_tokens"),
            Column("In a dataset", "used", "flag"),
        ),
    ),
    "preferences": Shown(
        "Preferences",
        (
            Column("Preference", "preference_id", "code", _own("preference", "preference_id")),
            Column("Kind", "kind", "text"),
            _instance("preferences"),
            _ITERATION,
            Column("Chosen", "chosen_reward"),
            Column("Rejected", "rejected_reward"),
            Column("Margin", "margin"),
            Column("Steps cut", "dropped_steps"),
        ),
    ),
    "groups": Shown(
        "Groups of reinforcement learning",
        (
            Column("Step", "step"),
            Column("Group", "number", "number", lambda r: document.group(r["iteration_id"], r["step"], r["number"])),
            _instance("groups"),
            _ITERATION,
            Column("Episodes", "episodes"),
            Column("Wins", "wins"),
            Column("Mean reward", "reward"),
            Column("Contrast", "contrast", "flag"),
        ),
    ),
    "rejections": Shown(
        "Rejections",
        (
            _ITERATION,
            Column("Stage", "stage", "text"),
            Column("Reason", "reason", "text"),
            Column("Of", "subject", "code", lambda r: document.with_query("/find", {"q": r["subject"]})),
            Column("Detail", "detail", "long"),
        ),
    ),
    "differences": Shown(
        "The same instances before and after",
        (
            _GOAL,
            _instance("trajectories"),
            _DEPTH,
            Column("Repeat", "repeat"),
            Column("Given steps", "cut"),
            Column("Before", "before", "flag", _own("trajectory", "before_id")),
            Column("After", "after", "flag", _own("trajectory", "after_id")),
            Column("Reward before", "before_reward"),
            Column("Reward after", "after_reward"),
        ),
    ),
}


def list_page(store: Store, name: str, query: Mapping[str, str]) -> ListPage:
    """Return a page of a list. Filters that the list lacks, and pages that do not exist, are
    ignored: a link may be old.
    """
    source, shown = LISTINGS[name], SHOWN[name]
    filters = {key: value for key, value in query.items() if key in source.filters and value}
    asked = query.get("page", "")
    page = min(int(asked), 10**9) if asked.isascii() and asked.isdigit() else 0
    found = listed(store, source, filters, offset=page * PAGE_ROWS, limit=PAGE_ROWS)

    def link(number: int) -> str:
        return document.with_query(f"/{name}", {**filters, "page": number})

    return ListPage(
        name=name,
        title=shown.title,
        columns=shown.columns,
        rows=[[_cell(column, record) for column in shown.columns] for record in found.rows],
        total=found.total,
        first=page * PAGE_ROWS + 1,
        filters=filters,
        choices=choices(store, source),
        free=tuple(key for key in source.filters if key not in source.choices),
        previous=link(page - 1) if page else None,
        following=link(page + 1) if (page + 1) * PAGE_ROWS < found.total else None,
    )


def _cell(column: Column, record: Record) -> Cell:
    value = record[column.name]
    href = column.leads(record) if value is not None else None
    if value is None:
        return Cell(wording.NOTHING)
    if column.kind == "goal":
        return Cell(goal(value), href)
    if column.kind == "flag":
        return Cell("yes" if value else "no", href, "good" if value else "soft")
    return Cell(number(value) if isinstance(value, float) else str(value), href)


def number(value: float | None) -> str:
    """Return a number with at most three decimals and a true minus sign; a dash for None."""
    if value is None:
        return wording.NOTHING
    return f"{value:z.3f}".rstrip("0").rstrip(".").replace("-", wording.MINUS)
