"""Write a page and a picture of the schema that the store's migrations create."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree as ET

from agentr_core.errors import ConfigError
from agentr_core.reports.markdown import escape
from agentr_core.store.database import Store
from agentr_core.store.queries.schema import Column, Reference, Relation, references, relations
from agentr_core.store.questions import examples
from agentr_core.system import write_text

PAGE, PICTURE = "README.md", "schema.svg"
TITLE = "# The schema of the store"
_HUBS = ("instance", "iteration")
"""Tables to which so many others refer that lines to them would hide the rest: the boxes of those
others name them instead.
"""
_WIDTH, _HEIGHT, _COLUMN, _ROW = 150.0, 34.0, 196.0, 46.0
_STYLE = """
svg { background: #fff; font: 12px ui-sans-serif, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
rect { fill: #f1f5fa; stroke: #23568f; } .hub rect { fill: #fff4e6; stroke: #a3480f; }
text { fill: #1c2127; } .refers { font-size: 9px; fill: #5d6670; }
path { fill: none; stroke: #5d6670; stroke-width: 1.1; }
"""
Place = tuple[float, float]


def write_schema(folder: Path) -> list[Path]:
    """Write the page of the schema and its picture into a folder; return their paths.

    Raises `ConfigError` if the folder has another page of that name.
    """
    paths = [folder / PAGE, folder / PICTURE]
    if paths[0].exists() and not paths[0].read_text("utf-8", "replace").startswith(TITLE):
        raise ConfigError(f"{paths[0]} exists and is not a page of the schema; name another folder")
    with TemporaryDirectory() as scratch:
        store = Store(Path(scratch) / "store.duckdb")
        store.write({})
        schema, links = relations(store), references(store)
    for path, text in zip(paths, (page(schema, links), picture(schema, links)), strict=True):
        write_text(path, text)
    return paths


def page(schema: Sequence[Relation], links: Sequence[Reference]) -> str:
    """Return the page as Markdown: what each table, view and column is, and what it refers to."""
    tables, views = ([relation for relation in schema if relation.view is kind] for kind in (False, True))
    return "".join(
        [
            f"{TITLE}\n\n`agentr store schema agentr_core/store/schema` writes this page from what "
            "the migrations\nmake, and a test holds it to that. Keys are bold. Each table has `created_at`, too. "
            "Questions\nusually start from a view, or from one of these (`agentr sql --example NAME`):\n\n",
            "| example | what it tells |\n|:--|:--|\n",
            *(f"| `{name}` | {escape(example.about)} |\n" for name, example in examples().items()),
            f"\n![Tables and what refers to what]({PICTURE})\n",
            "\n## Views\n",
            *(line for view in views for line in _relation(view, {})),
            "\n## Tables\n",
            *(line for table in tables for line in _relation(table, _named(links, table.name))),
        ]
    )


def _named(links: Sequence[Reference], table: str) -> Mapping[str, str]:
    targets: dict[str, list[str]] = {}
    for link in links:
        if link.table == table:
            targets.setdefault(link.column, []).append(link.to)
    return {column: ", ".join(to) for column, to in targets.items()}


def _relation(relation: Relation, links: Mapping[str, str]) -> Iterator[str]:
    yield f"\n### {relation.name}\n\n| | {escape(relation.about)} | |\n|:--|:--|:--|\n"
    for column in relation.columns:
        yield _line(column, links.get(column.name, ""))


def _line(column: Column, to: str) -> str:
    name = f"**`{column.name}`**" if column.key else f"`{column.name}`"
    leads = f"key of {to}" if to else ""
    about = escape(". ".join(filter(None, (leads, column.about))))
    return f"| {name} | {about} | {column.kind.lower()} |\n"


def picture(schema: Sequence[Relation], links: Sequence[Reference]) -> str:
    """Return the tables as an SVG: each to the right of those it refers to."""
    tables = [relation.name for relation in schema if not relation.view]
    edges = [link for link in links if link.to not in _HUBS and link.table != link.to]
    places = _places(tables, edges)
    across, down = (max(place[axis] for place in places.values()) for axis in (0, 1))
    width, height = across + _WIDTH + 20, down + _HEIGHT + 20
    label = f"{len(tables)} tables of the store, each to the right of those whose keys it has"
    box = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
    svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": label, **box})
    ET.SubElement(svg, "style").text = _STYLE
    for table, to in sorted({(link.table, link.to) for link in edges}):
        _curve(svg, places[to], places[table])
    for table in tables:
        _box(svg, table, places[table], sorted({link.to for link in links if link.table == table and link.to in _HUBS}))
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _places(tables: Sequence[str], links: Sequence[Reference]) -> dict[str, Place]:
    """Return the x and y of each table: one column to the right of all those it refers to, and
    about as high; tables without lines are below, in rows.
    """
    parents = {table: sorted({link.to for link in links if link.table == table}) for table in tables}
    linked_tables = {name for link in links for name in (link.table, link.to)}
    ranks = _ranks(parents)
    places: dict[str, Place] = {}
    free: Counter[int] = Counter()
    for table in sorted(linked_tables, key=lambda name: (ranks[name], _middle(parents[name], places), name)):
        rank = ranks[table]
        row = max(free[rank], round(_middle(parents[table], places)))
        places[table], free[rank] = (rank, row), row + 1
    columns, bottom = max(ranks.values()) + 1, max(free.values()) + 1
    for number, table in enumerate(sorted(set(tables) - linked_tables)):
        places[table] = (number % columns, bottom + number // columns)
    return {table: (10 + _COLUMN * across, 10 + _ROW * down) for table, (across, down) in places.items()}


def _ranks(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    ranks: dict[str, int] = {}

    def rank(table: str, above: tuple[str, ...] = ()) -> int:
        if table not in ranks:
            # A cycle, such as trajectories and those they continue, ends where it closes.
            ranks_below = (rank(to, (*above, table)) + 1 for to in parents[table] if to not in above)
            ranks[table] = max(ranks_below, default=0)
        return ranks[table]

    for table in parents:
        rank(table)
    return ranks


def _middle(parents: Sequence[str], places: Mapping[str, Place]) -> float:
    rows = [places[parent][1] for parent in parents if parent in places]
    return sum(rows) / len(rows) if rows else 0.0


def _curve(svg: ET.Element, start: Place, end: Place) -> None:
    (x1, y1), (x2, y2) = (start[0] + _WIDTH, start[1] + _HEIGHT / 2), (end[0], end[1] + _HEIGHT / 2)
    bend = max(20.0, (x2 - x1) / 2)
    path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    ET.SubElement(svg, "path", {"d": path})


def _box(svg: ET.Element, name: str, place: Place, hubs: Sequence[str]) -> None:
    group = ET.SubElement(svg, "g", {"class": "hub"} if name in _HUBS else {})
    x, y = place
    size = {"width": f"{_WIDTH:g}", "height": f"{_HEIGHT:g}", "rx": "3"}
    ET.SubElement(group, "rect", {"x": f"{x:g}", "y": f"{y:g}", **size})
    ET.SubElement(group, "text", {"x": f"{x + 8:g}", "y": f"{y + (15 if hubs else 21):g}"}).text = name
    if hubs:
        note = ET.SubElement(group, "text", {"class": "refers", "x": f"{x + 8:g}", "y": f"{y + 27:g}"})
        note.text = f"of {', '.join(hubs)}"
