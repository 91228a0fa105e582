"""The addresses of the viewer's pages, which do not change, so that others may link to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

VIEWER = "http://127.0.0.1:4280"
"""Where `agentr view` shows a workspace by default: reports link there."""


def page_of(kind: str, key: str) -> str:
    """Return the address of a row of the store: `/KIND/ID`; `key` is `TREE#NUMBER` for a node."""
    return f"/{kind}/{quote(key, safe='').replace('%23', '/')}"


def group(iteration_id: str, step: int, number: int) -> str:
    """Return the address of a group of reinforcement learning."""
    return f"/group/{quote(iteration_id, safe='')}/{step}/{number}"


def listing(name: str, **filters: Any) -> str:
    """Return the address of a list narrowed by filters; filters that are None are left out."""
    return with_query(f"/{name}", {key: value for key, value in filters.items() if value is not None})


def with_query(path: str, query: Mapping[str, Any]) -> str:
    """Return a path with a query."""
    return f"{path}?{urlencode(query)}" if query else path
