"""What a run leaves in its store, as hashes that two runs share if they did the same: the rows that
it trained on, and each view without times, paths and ids.
"""

from __future__ import annotations

import re
from typing import Any

from agentr_core.fingerprint import fingerprint
from agentr_core.store.database import Store

_ID = re.compile(r"\b[0-9a-f]{16}\b|\b[0-9a-f]{64}\b")
_PATH = re.compile(r"(?:/[\w.-]+)+")
_OF_THIS_TIME = re.compile(r"second|time|_at$|started|finished|milli|speed|duration|workspace|path|version|packages")
"""Columns whose values differ between two runs of the same recipe."""
_DIGITS = 5
"""Of numbers: sums of floats depend on the processor."""


def dataset_hashes(store: Store) -> list[str]:
    """Return the hash of each dataset of a store, over its rows in order, by iteration."""
    rows = store.rows("select d.hash from dataset d join iteration i using (iteration_id) order by i.iteration")
    return [str(digest) for (digest,) in rows]


def view_hashes(store: Store) -> dict[str, str]:
    """Return a hash of the rows of each public view, by its name."""
    names = store.rows("select view_name from duckdb_views() where starts_with(view_name, 'v_') order by 1")
    return {name: _hash_of_view(store, name) for (name,) in names}


def _hash_of_view(store: Store, name: str) -> str:
    columns = store.rows("select column_name, data_type from duckdb_columns() where table_name = ? order by 1", name)
    stable_columns = [column for column, kind in columns if "TIME" not in kind and not _OF_THIS_TIME.search(column)]
    if not stable_columns:
        return ""
    chosen = ", ".join(f'"{column}"' for column in stable_columns)
    texts = [_PATH.sub("/", repr(tuple(map(_plain, row)))) for row in store.rows(f"select {chosen} from {name}")]
    # An id is told by all that stands beside it. Its rank would not do: of rows that are alike but
    # for their ids, either may be the first.
    beside: dict[str, list[tuple[str, int]]] = {}
    for text in texts:
        for position, match in enumerate(_ID.finditer(text)):
            beside.setdefault(match[0], []).append((_ID.sub("", text), position))
    names = {name: fingerprint(sorted(places)) for name, places in beside.items()}
    return fingerprint(sorted(_ID.sub(lambda match: names[match[0]], text) for text in texts))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value
