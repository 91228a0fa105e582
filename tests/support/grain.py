"""How finely a package is cut: the names that its modules look up in one another, its helpers that
are used once, and packages that only re-export.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

LEAST = 5
"""A module of fewer lines is not asked for its names."""


def own_names_per_100_lines(root: Path, package: str) -> float:
    """Return the names that the modules of a package import from the package itself, in 100 of all
    its lines. A module that is imported whole counts as many names as attributes of it are used.
    """
    texts = _texts(root, package)
    modules = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in texts}
    module_texts = [text for name, text in texts.items() if not _is_package(name) and text.count("\n") >= LEAST]
    names = sum(_own_names(ast.parse(text), package, modules) for text in module_texts)
    return 100 * names / sum(text.count("\n") for text in texts.values())


def used_once(root: Path, package: str) -> list[str]:
    """Return the private functions of modules whose names stand in one place beside their own, in
    the same module.
    """
    return sorted(
        node.name
        for name, text in _texts(root, package).items()
        if not _is_package(name)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_")
        if len(re.findall(rf"\b{node.name}\b", text)) == 2
    )


def facades(root: Path, package: str) -> set[str]:
    """Return the packages inside a package, and itself, that only import names from elsewhere."""
    return {
        name.removesuffix("/__init__.py")
        for name, text in _texts(root, package).items()
        if _is_package(name) and _only_imports(ast.parse(text).body)
    }


def _texts(root: Path, package: str) -> Mapping[str, str]:
    """Return the text of each file of a package, by its path."""
    files = sorted((root / package).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _is_package(name: str) -> bool:
    return name.endswith("__init__.py")


def _only_imports(body: list[ast.stmt]) -> bool:
    code = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return bool(code) and all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in code)


def _own_names(tree: ast.Module, package: str, modules: set[str]) -> int:
    names, whole = 0, dict[str, set[str]]()
    for module, name, local in _own_imports(tree, package):
        if not name or f"{module}.{name}" in modules:
            whole[local] = set()
        else:
            names += 1
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (attributes := whole.get(ast.unparse(node.value))) is not None:
            attributes.add(node.attr)
    return names + sum(max(1, len(attributes)) for attributes in whole.values())


def _own_imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and local name of each import from a package; a module has no name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == package):
            # `from . import a` names modules.
            names = ((alias.name if node.module else "", alias.asname or alias.name) for alias in node.names)
            yield from ((node.module or "", *pair) for pair in names)
        if isinstance(node, ast.Import):
            aliases = (alias for alias in node.names if alias.name.split(".")[0] == package)
            yield from ((alias.name, "", alias.asname or alias.name) for alias in aliases)
