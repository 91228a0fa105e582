"""Long texts by their hash."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from agentr_core.fingerprint import fingerprint
from agentr_core.store.tables import Row
from agentr_core.types import Instance


# The rows of one expansion name each text up to three times.
@lru_cache(maxsize=4096)
def text_id(text: str) -> str:
    """Return the id under which a text is stored."""
    return fingerprint(text)


def text_rows(texts: Iterable[str]) -> list[Row]:
    """Return one row of table `text` for each different text."""
    return [{"text_id": text_id(text), "text": text} for text in dict.fromkeys(texts)]


def instance_row(instance: Instance, depth: int | None = None, origin: Instance | None = None) -> Row:
    """Return the row of table `instance`; `depth` is its difficulty class, `origin` the instance it
    is a variant of, if any.

    The first row of an instance stays: store those with a depth before anything refers to them.
    """
    return {
        "instance_id": instance.key,
        "environment": instance.environment,
        "split": instance.split,
        "instance_index": instance.index,
        "depth": depth,
        "origin_id": None if origin is None or origin == instance else origin.key,
    }
