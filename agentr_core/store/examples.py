"""Example queries in SQL, by name."""

from __future__ import annotations

import re
from importlib import resources
from typing import NamedTuple

from agentr_core.errors import ConfigError

_HEAD = re.compile(r"^-- ([a-z][a-z-]*): (.+)\n", re.M)


class Example(NamedTuple):
    """A query, with one sentence about what it shows."""

    about: str
    sql: str


def examples() -> dict[str, Example]:
    """Return the queries of `examples.sql` by name, in their order."""
    text = resources.files("agentr_core.store").joinpath("examples.sql").read_text(encoding="utf-8")
    _, *parts = _HEAD.split(text)
    names, abouts, queries = parts[::3], parts[1::3], parts[2::3]
    return {name: Example(about, sql.strip()) for name, about, sql in zip(names, abouts, queries, strict=True)}


def example(name: str) -> Example:
    """Return a query by its name. Raises `ConfigError` for an unknown one."""
    known = examples()
    if name not in known:
        raise ConfigError(f"there is no example {name}; there are {', '.join(known)}")
    return known[name]
