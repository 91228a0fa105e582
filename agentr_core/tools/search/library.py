"""The library that indexes words, imported without JAX.

Where JAX is installed, bm25s asks it for a first result as soon as it is imported, and JAX then
reserves three quarters of each GPU: on an H200 105 of 140 GB, which models in the same process
lacked. What is used of bm25s needs no JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STOPWORDS_EN", "Tokenized", "bm25s"]


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Make imports of a module fail as if it were not installed."""
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


with _hidden("jax"):
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN
    from bm25s.tokenization import Tokenized
