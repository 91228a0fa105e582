"""All SQL of the program lies in `agentr_core/store`."""

import ast
import re

import pytest
from readme import ROOT

STORE = ROOT / "agentr_core" / "store"
FILES = [
    file
    for package in ("agentr_core", "flows", "tasks")
    for file in sorted((ROOT / package).rglob("*.py"))
    if not file.is_relative_to(STORE)
]
SQL = re.compile(
    r"\s*(select\b.*\bfrom\b|insert\s+into\b|update\s+\S+\s+set\b|delete\s+from\b|with\s+\w+\s+as\s*\()",
    re.IGNORECASE | re.DOTALL,
)


def literals(source: str) -> list[tuple[int, str]]:
    """Return line and text of each string, of an f-string with what is filled in left out."""
    strings = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            strings.append((node.lineno, " _ ".join(map(str, texts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append((node.lineno, node.value))
    return strings


def queries(source: str) -> list[int]:
    return sorted({line for line, text in literals(source) if SQL.match(text)})


@pytest.mark.slow
def test_no_module_outside_the_store_has_a_query() -> None:
    locations = [f"{file.relative_to(ROOT)}:{line}" for file in FILES for line in queries(file.read_text("utf-8"))]
    assert not locations, f"move these into a module of agentr_core/store/queries: {', '.join(locations)}"


@pytest.mark.parametrize(
    "line",
    [
        'place.rows("select a from b where c = ?", 1)',
        'place.rows(f"select {column} from b")',
        'QUERY = """\nwith a as (select 1)\nselect * from a\n"""',
        'con.execute("update tree set writer = 1")',
        'con.execute(f"insert into {table} by name select 1")',
    ],
)
def test_a_query_is_seen(line: str) -> None:
    assert queries(line)


@pytest.mark.parametrize("line", ['"with a window"', '"Update the index."', '"select one of them"'])
def test_prose_is_not_taken_for_one(line: str) -> None:
    assert not queries(line)
