"""Pages of lists: the contents and links of their columns, filters, and paging."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from agentr_core.reports import document, wording
from agentr_core.store.database import Store
from agentr_core.store.queries.evaluations import EvaluationName, changes, evaluation_names
from agentr_core.store.queries.facts import with_facts
from agentr_core.store.queries.listings import LISTINGS, Listing, choices, listing_sql, read_list, sortable, suggestions
from agentr_core.texts import goal

PAGE_ROWS: Final = 50
_COMPUTED: Final = ("=", "+", "-", "@", "\t", "\r")
"""The first characters of a text that a spreadsheet would take for a formula."""
MOST_ROWS: Final = 100_000
"""The maximum number of rows of a list as a file."""
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
    extra: bool = False
    """Whether it is shown only to those who choose it."""


@dataclass(frozen=True, slots=True)
class ListView:
    """A list as a page shows it."""

    title: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """The contents of the page of a list."""

    name: str
    title: str
    columns: tuple[Column, ...]
    every: tuple[Column, ...]
    """All columns that can be chosen."""
    heads: list[Cell]
    """The titles of the columns, with links that sort by them; their tone is `asc` or `desc`."""
    rows: list[list[Cell]]
    total: int
    first: int
    """The number of the first row shown, from 1."""
    filters: dict[str, str]
    choices: dict[str, list[str]]
    """The possible values of each filter that has only a few."""
    free: tuple[str, ...]
    """The filters whose value is typed in."""
    titles: dict[str, str]
    """The titles of the filters on facts that worlds give about their instances, by column."""
    suggestions: dict[str, list[tuple[str, str]]]
    """Suggested values for filters that are typed in, each with a name for it."""
    crumbs: list[Cell]
    sides: dict[str, EvaluationName]
    """For differences: the two evaluations that are compared, as `before` and `after`."""
    changes: dict[str, Cell]
    """For differences: how many episodes changed and how, with links to them."""
    keeps: dict[str, str]
    """The query parameters for order and columns, which the form with the filters passes on."""
    sql: str
    files: dict[str, str]
    """The addresses of the whole list as a file, by format."""
    previous: str | None
    following: str | None


def _own(kind: str, column: str) -> Callable[[Record], str | None]:
    return lambda record: document.page_of(kind, record[column])


def _instance(name: str) -> Column:
    return Column("Instance", "instance_id", "code", lambda r: document.listing(name, instance=r["instance_id"]))


_GOAL = Column("Goal", "first_observation", "goal")
_ITERATION = Column("Iteration", "iteration")
_DEPTH = Column("Depth", "depth")
SHOWN: Mapping[str, ListView] = {
    "trajectories": ListView(
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
            Column("World", "environment", "text", extra=True),
            Column("Split", "split", "text", extra=True),
            Column("Run", "run_id", "code", _own("run", "run_id"), extra=True),
            Column("Evaluation", "evaluation", "text", extra=True),
            Column("Stored", "created_at", "text", extra=True),
            # Not shown unless chosen, so that no bundle has them.
            Column("Tags", "tags", "text", lambda r: f"/notes/{r['trajectory_id']}", extra=True),
            Column("Note", "note", "long", lambda r: f"/notes/{r['trajectory_id']}", extra=True),
        ),
    ),
    "trees": ListView(
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
    "pairs": ListView(
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
    "samples": ListView(
        "Samples",
        (
            Column("Sample", "sample_id", "code", _own("sample", "sample_id")),
            _GOAL,
            Column("Kind", "kind", "text"),
            _instance("samples"),
            _ITERATION,
            Column("Tokens", "num_tokens"),
            Column("Trained", "num_trained_tokens"),
            Column("In a dataset", "used", "flag"),
        ),
    ),
    "preferences": ListView(
        "Preferences",
        (
            Column("Preference", "preference_id", "code", _own("preference", "preference_id")),
            _GOAL,
            Column("Kind", "kind", "text"),
            _instance("preferences"),
            _ITERATION,
            Column("Chosen", "chosen_reward"),
            Column("Rejected", "rejected_reward"),
            Column("Margin", "margin"),
            Column("Steps cut", "dropped_steps"),
        ),
    ),
    "groups": ListView(
        "Groups of reinforcement learning",
        (
            Column("Step", "step"),
            Column("Group", "number", "number", lambda r: document.group(r["iteration_id"], r["step"], r["number"])),
            _GOAL,
            _instance("groups"),
            _ITERATION,
            Column("Episodes", "episodes"),
            Column("Wins", "wins"),
            Column("Mean reward", "reward"),
            Column("Contrast", "contrast", "flag"),
        ),
    ),
    "rejections": ListView(
        "Rejections",
        (
            _ITERATION,
            Column("Stage", "stage", "text"),
            Column("Reason", "reason", "text"),
            Column("Of", "subject", "code", lambda r: document.with_query("/find", {"q": r["subject"]})),
            Column("Detail", "detail", "long"),
        ),
    ),
    "regrades": ListView(
        "Episodes and paths of trees that were scored again",
        (
            Column("Trajectory", "trajectory_id", "code", _own("trajectory", "trajectory_id")),
            Column("Leaf", "node", "code", _own("node", "node")),
            _GOAL,
            Column("Change", "change", "text"),
            Column("Reward", "reward"),
            Column("New", "new_reward"),
            Column("Success", "success", "flag"),
            Column("New", "new_success", "flag"),
            _instance("trajectories"),
            Column("Episodes of", "episodes_of", "text"),
            _ITERATION,
            Column("Scored by", "grader", "text"),
            Column("Scoring", "scoring_id", "code", extra=True),
            Column("Run", "run_id", "code", _own("run", "run_id"), extra=True),
            Column("Reply", "reply", "long", extra=True),
        ),
    ),
    "differences": ListView(
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
    """Return a page of a list. Unknown filters, orders and columns in `query` are ignored, since a
    link may be old; without a valid page number, the page is the first.
    """
    shape = _shape(store, name)
    source = shape.source
    filters, sort, columns = _wanted(shape, query)
    page_text = query.get("page", "")
    page = min(int(page_text), 10**9) if page_text.isascii() and page_text.isdigit() else 0
    matches = read_list(store, source, filters, offset=page * PAGE_ROWS, limit=PAGE_ROWS, sort=sort)
    keeps = {"sort": sort, "columns": query["columns"] if columns != shape.usual else ""}
    keeps = {key: value for key, value in keeps.items() if value}
    sides = evaluation_names(store, [filters[key] for key in ("before", "after", "evaluation") if key in filters])
    both = name == "differences" and set(source.always) <= filters.keys()

    of = next((sides[filters[key]] for key in ("evaluation", "after", "before") if filters.get(key) in sides), None)
    run = filters.get("run") or (of.run_id if of else None)
    crumbs = [Cell(run, document.page_of("run", run))] if run else []
    if "evaluation" in filters and of:
        crumbs.append(Cell(f"{wording.label(of.name)}, {wording.iteration(of.iteration)}"))

    def link(path: str = f"/{name}", **more: Any) -> str:
        return document.with_query(path, {**filters, **keeps, **more})

    return ListPage(
        name=name,
        title=SHOWN[name].title,
        columns=columns,
        every=shape.columns,
        heads=[_head(column, sort, column.name in sortable(source), link) for column in columns],
        rows=[[_cell(column, record) for column in columns] for record in matches.rows],
        total=matches.total,
        first=page * PAGE_ROWS + 1,
        filters=filters,
        choices=choices(store, source),
        free=tuple(key for key in source.filters if key not in source.choices),
        titles=shape.titles,
        suggestions=suggestions(store, source),
        crumbs=crumbs,
        sides={key: sides[filters[key]] for key in ("before", "after") if filters.get(key) in sides},
        changes={
            kind: Cell(wording.count(count), link(change=kind))
            for kind, count in (changes(store, filters["before"], filters["after"]) if both else {}).items()
        },
        keeps=keeps,
        sql=listing_sql(source, filters, sort=sort),
        files={form: link(f"/{name}.{form}") for form in ("csv", "json")},
        previous=link(page=page - 1) if page else None,
        following=link(page=page + 1) if (page + 1) * PAGE_ROWS < matches.total else None,
    )


def list_file(store: Store, name: str, form: str, query: Mapping[str, str]) -> str | None:
    """Return all rows of a list that pass the filters as CSV or JSON (`form`); None if there are
    more than `MOST_ROWS`.

    JSON also has the SQL query and the total. In CSV, a text that a spreadsheet would take for a
    formula gets an apostrophe in front.
    """
    shape = _shape(store, name)
    filters, sort, columns = _wanted(shape, query)
    matches = read_list(store, shape.source, filters, offset=0, limit=MOST_ROWS, sort=sort)
    if matches.total > MOST_ROWS:
        return None
    names = [column.name for column in columns]
    if form == "json":
        sql = listing_sql(shape.source, filters, sort=sort)
        rows = [{name: row[name] for name in names} for row in matches.rows]
        return json.dumps({"sql": sql, "total": matches.total, "rows": rows}, default=str, indent=1)
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(names)
    for row in matches.rows:
        cells = [", ".join(row[name]) if isinstance(row[name], list) else row[name] for name in names]
        writer.writerow([f"'{c}" if isinstance(c, str) and c.startswith(_COMPUTED) else c for c in cells])
    return lines.getvalue()


@dataclass(frozen=True, slots=True)
class _Shape:
    """A list including the columns and filters of facts that worlds give about their instances;
    `titles` has the titles of these filters, by column.
    """

    source: Listing
    columns: tuple[Column, ...]
    titles: dict[str, str]

    @property
    def usual(self) -> tuple[Column, ...]:
        """The columns that are shown unless others are chosen."""
        return tuple(column for column in self.columns if not column.extra)


def _shape(store: Store, name: str) -> _Shape:
    columns = SHOWN[name].columns
    source, facts = with_facts(store, name)
    own_names = {column.title.lower() for column in columns} | set(LISTINGS[name].filters)
    words = {fact.column: fact.name.replace("_", " ") for fact in facts}
    titles = {column: f"{word} of the world" if word in own_names else word for column, word in words.items()}
    from_world = [
        Column(titles[fact.column].capitalize(), fact.column, "number" if fact.numeric else "text") for fact in facts
    ]
    # Next to the column of the instance.
    place = next((at for at, column in enumerate(columns, 1) if column.name == "instance_id"), 0)
    return _Shape(source, (*columns[:place], *from_world, *columns[place:]), titles)


def _wanted(shape: _Shape, query: Mapping[str, str]) -> tuple[dict[str, str], str, tuple[Column, ...]]:
    """Return the filters, the order (empty: the usual one) and the columns that a query names."""
    filters = {key: value for key, value in query.items() if key in shape.source.filters and value}
    sort = query.get("sort", "")
    if sort.removeprefix("-") not in sortable(shape.source):
        sort = ""
    names = query.get("columns", "").split(",")
    return filters, sort, tuple(column for column in shape.columns if column.name in names) or shape.usual


def _head(column: Column, sort: str, can: bool, link: Callable[..., str]) -> Cell:
    if not can:
        return Cell(column.title)
    # First the largest numbers; texts from A to Z.
    ways = ("-", "") if column.kind in ("number", "flag") else ("", "-")
    first, second = (f"{way}{column.name}" for way in ways)
    tone = "desc" if sort == f"-{column.name}" else "asc" if sort == column.name else ""
    return Cell(column.title, link(sort=second if sort == first else first), tone)


def _cell(column: Column, record: Record) -> Cell:
    value = record[column.name]
    href = column.leads(record) if value is not None else None
    if value is None:
        return Cell(wording.NOTHING)
    if column.kind == "goal":
        return Cell(goal(value), href)
    if isinstance(value, list):
        return Cell(", ".join(value) or wording.NOTHING, href)
    if column.kind == "flag":
        return Cell("yes" if value else "no", href, "good" if value else "soft")
    return Cell(number(value) if isinstance(value, float) else str(value), href)


def number(value: float | None) -> str:
    """Return a number with at most three decimals and a true minus sign; a dash for None."""
    if value is None:
        return wording.NOTHING
    return f"{value:z.3f}".rstrip("0").rstrip(".").replace("-", wording.MINUS)
