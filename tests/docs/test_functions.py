"""Functions and modules that a reader can take in: a function has at most 60 lines, the docstring
not counted, and a module 800. Names say what they name: none is a pronoun or "what was found".
"""

import ast
from collections.abc import Iterator

import pytest
from readme import ROOT

LINES = 60
LINES_OF_MODULE = 800
FILES = sorted(path for package in ("agentr_core", "flows", "tasks") for path in ROOT.joinpath(package).rglob("*.py"))
LONGER = {
    # The registry reads the names of a world's options from this signature.
    "agentr_core/environments/reasoning/world.py:Reasoning.__init__",
}
"""Functions that two would say worse."""
EMPTY_NAMES = {"found", "made", "mine", "one", "ones", "theirs"}


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield each function below a node by its dotted name, with its lines without the docstring."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(child, name)
            continue
        path = f"{name}.{child.name}".lstrip(".")
        if not isinstance(child, ast.ClassDef):
            statement = child.body[0]
            has_docstring = ast.get_docstring(child, clean=False) is not None
            yield path, length(child) - (length(statement) if has_docstring else 0)
        yield from functions(child, path)


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_are_short() -> None:
    long = {
        f"{file.relative_to(ROOT)}:{name}"
        for file in FILES
        for name, lines in functions(ast.parse(file.read_text(encoding="utf-8")))
        if lines > LINES
    }
    # Whoever shortens one takes it off the list.
    assert long == LONGER


def test_modules_are_short() -> None:
    assert not [file for file in FILES if file.read_text(encoding="utf-8").count("\n") > LINES_OF_MODULE]


def name_of(node: ast.AST) -> str | None:
    """Return the name that a node gives to something, if it does."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
    return None


def test_no_name_is_empty() -> None:
    assert not {
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (name := name_of(node)) in EMPTY_NAMES
    }
    code = "for one in them:\n  pass\ndef made(mine):\n  found = [theirs for theirs in found]"
    assert {name_of(node) for node in ast.walk(ast.parse(code))} == {None, *EMPTY_NAMES - {"ones"}}


@pytest.mark.parametrize(("lines", "documented"), [(60, False), (61, False), (60, True)])
def test_a_docstring_does_not_count(lines: int, documented: bool) -> None:
    docstring = ['    """A.', "", '    B."""'] if documented else []
    code = "\n".join(["class A:", "  def f():", *docstring, *["    pass"] * (lines - 1)])
    assert list(functions(ast.parse(code))) == [("A.f", lines)]
