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
from agentr_core.store.queries.evaluations import EvaluationName, evaluation_names, outcome_changes
from agentr_core.store.queries.facts import listing_with_facts
from agentr_core.store.queries.listings import (
    LISTINGS,
    Listing,
    filter_choices,
    filter_suggestions,
    listing_sql,
    read_list,
    sortable_columns,
)
from agentr_core.texts import goal_in

PAGE_ROWS: Final = 50
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""The first characters of a text that a spreadsheet would take for a formula."""
MAX_FILE_ROWS: Final = 100_000
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
    link: Callable[[Record], str | None] = lambda record: None
    is_optional: bool = False
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
    all_columns: tuple[Column, ...]
    """All columns that can be chosen."""
    headers: list[Cell]
    """The titles of the columns, with links that sort by them; their tone is `asc` or `desc`."""
    rows: list[list[Cell]]
    total: int
    first_row: int
    """The number of the first row shown, from 1."""
    filters: dict[str, str]
    choices: dict[str, list[str]]
    """The possible values of each filter that has only a few."""
    typed_filters: tuple[str, ...]
    """The filters whose value is typed in."""
    titles: dict[str, str]
    """The titles of the filters on facts that worlds give about their instances, by column."""
    suggestions: dict[str, list[tuple[str, str]]]
    """Suggested values for filters that are typed in, each with a name for it."""
    crumbs: list[Cell]
    compared_evaluations: dict[str, EvaluationName]
    """For differences: the two evaluations that are compared, as `before` and `after`."""
    changes: dict[str, Cell]
    """For differences: how many episodes changed and how, with links to them."""
    kept_query: dict[str, str]
    """The query parameters for order and columns, which the form with the filters passes on."""
    sql: str
    files: dict[str, str]
    """The addresses of the whole list as a file, by format."""
    previous: str | None
    following: str | None


def _page_link(kind: str, column: str) -> Callable[[Record], str | None]:
    return lambda record: document.page_path(kind, record[column])


def _instance_column(name: str) -> Column:
    return Column("Instance", "instance_id", "code", lambda r: document.list_path(name, instance=r["instance_id"]))


_GOAL = Column("Goal", "first_observation", "goal")
_ITERATION = Column("Iteration", "iteration")
_DEPTH = Column("Depth", "depth")
LIST_VIEWS: Mapping[str, ListView] = {
    "trajectories": ListView(
        "Trajectories",
        (
            Column("Trajectory", "trajectory_id", "code", _page_link("trajectory", "trajectory_id")),
            _GOAL,
            _instance_column("trajectories"),
            _DEPTH,
            Column("Source", "source", "text"),
            _ITERATION,
            Column("Success", "success", "flag"),
            Column("Reward", "reward"),
            Column("Steps", "num_steps"),
            Column("Ended by", "stop", "text"),
            Column("World", "environment", "text", is_optional=True),
            Column("Split", "split", "text", is_optional=True),
            Column("Run", "run_id", "code", _page_link("run", "run_id"), is_optional=True),
            Column("Evaluation", "evaluation", "text", is_optional=True),
            Column("Stored", "created_at", "text", is_optional=True),
            # Not shown unless chosen, so that no bundle has them.
            Column("Tags", "tags", "text", lambda r: f"/notes/{r['trajectory_id']}", is_optional=True),
            Column("Note", "note", "long", lambda r: f"/notes/{r['trajectory_id']}", is_optional=True),
        ),
    ),
    "trees": ListView(
        "Search trees",
        (
            Column("Tree", "tree_id", "code", _page_link("tree", "tree_id")),
            _GOAL,
            _instance_column("trees"),
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
            Column("Pair", "pair_id", "code", _page_link("pair", "pair_id")),
            _GOAL,
            _instance_column("pairs"),
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
            Column("Sample", "sample_id", "code", _page_link("sample", "sample_id")),
            _GOAL,
            Column("Kind", "kind", "text"),
            _instance_column("samples"),
            _ITERATION,
            Column("Tokens", "num_tokens"),
            Column("Trained", "num_trained_tokens"),
            Column("In a dataset", "used", "flag"),
        ),
    ),
    "preferences": ListView(
        "Preferences",
        (
            Column("Preference", "preference_id", "code", _page_link("preference", "preference_id")),
            _GOAL,
            Column("Kind", "kind", "text"),
            _instance_column("preferences"),
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
            Column(
                "Group", "number", "number", lambda r: document.group_path(r["iteration_id"], r["step"], r["number"])
            ),
            _GOAL,
            _instance_column("groups"),
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
            Column("Trajectory", "trajectory_id", "code", _page_link("trajectory", "trajectory_id")),
            Column("Leaf", "node", "code", _page_link("node", "node")),
            _GOAL,
            Column("Change", "change", "text"),
            Column("Reward", "reward"),
            Column("New", "new_reward"),
            Column("Success", "success", "flag"),
            Column("New", "new_success", "flag"),
            _instance_column("trajectories"),
            Column("Episodes of", "episodes_of", "text"),
            _ITERATION,
            Column("Scored by", "grader", "text"),
            Column("Scoring", "scoring_id", "code", is_optional=True),
            Column("Run", "run_id", "code", _page_link("run", "run_id"), is_optional=True),
            Column("Reply", "reply", "long", is_optional=True),
        ),
    ),
    "differences": ListView(
        "The same instances before and after",
        (
            _GOAL,
            _instance_column("trajectories"),
            _DEPTH,
            Column("Repeat", "repeat"),
            Column("Given steps", "cut"),
            Column("Before", "before", "flag", _page_link("trajectory", "before_id")),
            Column("After", "after", "flag", _page_link("trajectory", "after_id")),
            Column("Reward before", "before_reward"),
            Column("Reward after", "after_reward"),
        ),
    ),
}


def list_page(store: Store, name: str, query: Mapping[str, str]) -> ListPage:
    """Return a page of a list. Unknown filters, orders and columns in `query` are ignored, since a
    link may be old; without a valid page number, the page is the first.
    """
    facts_list = _list_with_facts(store, name)
    source = facts_list.source
    filters, sort, columns = _parse_query(facts_list, query)
    page_text = query.get("page", "")
    page = min(int(page_text), 10**9) if page_text.isascii() and page_text.isdigit() else 0
    matches = read_list(store, source, filters, offset=page * PAGE_ROWS, limit=PAGE_ROWS, sort=sort)
    kept_query = {"sort": sort, "columns": query["columns"] if columns != facts_list.default_columns else ""}
    kept_query = {key: value for key, value in kept_query.items() if value}
    evaluation_by_id = evaluation_names(
        store, [filters[key] for key in ("before", "after", "evaluation") if key in filters]
    )
    has_both_sides = name == "differences" and set(source.required_filters) <= filters.keys()

    evaluation = next(
        (
            evaluation_by_id[filters[key]]
            for key in ("evaluation", "after", "before")
            if filters.get(key) in evaluation_by_id
        ),
        None,
    )
    run = filters.get("run") or (evaluation.run_id if evaluation else None)
    crumbs = [Cell(run, document.page_path("run", run))] if run else []
    if "evaluation" in filters and evaluation:
        crumbs.append(Cell(f"{wording.label(evaluation.name)}, {wording.iteration_name(evaluation.iteration)}"))

    def link(path: str = f"/{name}", **more_query: Any) -> str:
        return document.with_query(path, {**filters, **kept_query, **more_query})

    return ListPage(
        name=name,
        title=LIST_VIEWS[name].title,
        columns=columns,
        all_columns=facts_list.columns,
        headers=[_header_cell(column, sort, column.name in sortable_columns(source), link) for column in columns],
        rows=[[_cell(column, record) for column in columns] for record in matches.rows],
        total=matches.total,
        first_row=page * PAGE_ROWS + 1,
        filters=filters,
        choices=filter_choices(store, source),
        typed_filters=tuple(key for key in source.filters if key not in source.choices),
        titles=facts_list.titles,
        suggestions=filter_suggestions(store, source),
        crumbs=crumbs,
        compared_evaluations={
            key: evaluation_by_id[filters[key]] for key in ("before", "after") if filters.get(key) in evaluation_by_id
        },
        changes={
            kind: Cell(wording.count(count), link(change=kind))
            for kind, count in (
                outcome_changes(store, filters["before"], filters["after"]) if has_both_sides else {}
            ).items()
        },
        kept_query=kept_query,
        sql=listing_sql(source, filters, sort=sort),
        files={file_format: link(f"/{name}.{file_format}") for file_format in ("csv", "json")},
        previous=link(page=page - 1) if page else None,
        following=link(page=page + 1) if (page + 1) * PAGE_ROWS < matches.total else None,
    )


def list_file(store: Store, name: str, file_format: str, query: Mapping[str, str]) -> str | None:
    """Return all rows of a list that pass the filters as CSV or JSON (`file_format`); None if there
    are more than `MAX_FILE_ROWS`.

    JSON also has the SQL query and the total. In CSV, a text that a spreadsheet would take for a
    formula gets an apostrophe in front.
    """
    facts_list = _list_with_facts(store, name)
    filters, sort, columns = _parse_query(facts_list, query)
    matches = read_list(store, facts_list.source, filters, offset=0, limit=MAX_FILE_ROWS, sort=sort)
    if matches.total > MAX_FILE_ROWS:
        return None
    names = [column.name for column in columns]
    if file_format == "json":
        sql = listing_sql(facts_list.source, filters, sort=sort)
        rows = [{name: row[name] for name in names} for row in matches.rows]
        return json.dumps({"sql": sql, "total": matches.total, "rows": rows}, default=str, indent=1)
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(names)
    for row in matches.rows:
        cells = [", ".join(row[name]) if isinstance(row[name], list) else row[name] for name in names]
        writer.writerow([f"'{c}" if isinstance(c, str) and c.startswith(_FORMULA_STARTS) else c for c in cells])
    return lines.getvalue()


@dataclass(frozen=True, slots=True)
class _ListWithFacts:
    """A list including the columns and filters of facts that worlds give about their instances;
    `titles` has the titles of these filters, by column.
    """

    source: Listing
    columns: tuple[Column, ...]
    titles: dict[str, str]

    @property
    def default_columns(self) -> tuple[Column, ...]:
        """The columns that are shown unless others are chosen."""
        return tuple(column for column in self.columns if not column.is_optional)


def _list_with_facts(store: Store, name: str) -> _ListWithFacts:
    columns = LIST_VIEWS[name].columns
    source, facts = listing_with_facts(store, name)
    own_names = {column.title.lower() for column in columns} | set(LISTINGS[name].filters)
    name_by_column = {fact.column: fact.name.replace("_", " ") for fact in facts}
    titles = {
        column: f"{fact_name} of the world" if fact_name in own_names else fact_name
        for column, fact_name in name_by_column.items()
    }
    fact_columns = [
        Column(titles[fact.column].capitalize(), fact.column, "number" if fact.numeric else "text") for fact in facts
    ]
    # Next to the column of the instance.
    index = next((number for number, column in enumerate(columns, 1) if column.name == "instance_id"), 0)
    return _ListWithFacts(source, (*columns[:index], *fact_columns, *columns[index:]), titles)


def _parse_query(
    facts_list: _ListWithFacts, query: Mapping[str, str]
) -> tuple[dict[str, str], str, tuple[Column, ...]]:
    """Return the filters, the order (empty: the usual one) and the columns that a query names."""
    filters = {key: value for key, value in query.items() if key in facts_list.source.filters and value}
    sort = query.get("sort", "")
    if sort.removeprefix("-") not in sortable_columns(facts_list.source):
        sort = ""
    names = query.get("columns", "").split(",")
    return (
        filters,
        sort,
        tuple(column for column in facts_list.columns if column.name in names) or facts_list.default_columns,
    )


def _header_cell(column: Column, sort: str, is_sortable: bool, link: Callable[..., str]) -> Cell:
    if not is_sortable:
        return Cell(column.title)
    # First the largest numbers; texts from A to Z.
    signs = ("-", "") if column.kind in ("number", "flag") else ("", "-")
    first, second = (f"{sign}{column.name}" for sign in signs)
    tone = "desc" if sort == f"-{column.name}" else "asc" if sort == column.name else ""
    return Cell(column.title, link(sort=second if sort == first else first), tone)


def _cell(column: Column, record: Record) -> Cell:
    value = record[column.name]
    href = column.link(record) if value is not None else None
    if value is None:
        return Cell(wording.NOTHING)
    if column.kind == "goal":
        return Cell(goal_in(value), href)
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
