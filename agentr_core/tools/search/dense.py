"""Ranking by meaning: the inner product of vectors on a flat FAISS index, which compares a query
with every document.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.tools.search.encoder import Encoder
from agentr_core.tools.search.ranking import Ranked

VERSION: Final = 2
"""To be raised when the same documents and encoder would give other vectors."""
_AT_ONCE: Final = 4096


class Dense:
    """A ranking of documents by the cosine between their vectors and a query's. Threads may share
    it.
    """

    name = "dense"

    def __init__(self, encoder: Encoder, index: Any) -> None:
        self.settings = {"version": VERSION, **encoder.settings}
        self._encoder = encoder
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str], encoder: Encoder) -> Dense:
        """Return the ranking of texts. Raises `ConfigError` when FAISS is not installed."""
        index = _faiss().IndexFlatIP(encoder.size)
        left = iter(texts)
        while some := list(islice(left, _AT_ONCE)):
            index.add(encoder.passages([unicodedata.normalize("NFKC", text) for text in some]))
        return cls(encoder, index)

    @classmethod
    def load(cls, file: Path, encoder: Encoder, *, rows: int) -> Dense:
        """Return a ranking with the vectors of a FAISS file, which may be made elsewhere.

        Args:
            rows: the number of documents in the corpus; the file must have a vector for each, in
                their order.

        Raises:
            DataFileError: the file is not a flat index of inner products, or does not fit the
                corpus or the encoder.
            ConfigError: FAISS is not installed.
        """
        faiss = _faiss()
        try:
            index = faiss.read_index(str(file))
        except RuntimeError as error:
            raise DataFileError(f"FAISS index {file} cannot be read; name a file that FAISS wrote") from error
        if not isinstance(index, faiss.IndexFlat) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DataFileError(f"{file} is a FAISS {type(index).__name__}; a flat index of inner products is needed")
        if (index.ntotal, index.d) != (rows, encoder.size):
            raise DataFileError(
                f"{file} has {index.ntotal} vectors of {index.d} numbers, but the corpus has {rows} documents and the "
                f"encoder makes {encoder.size} numbers; name the index of this corpus and encoder"
            )
        return cls(encoder, index)

    def save(self, file: Path) -> None:
        """Write the vectors into a FAISS file."""
        _faiss().write_index(self._index, str(file))

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranked]:
        """Return for each query the rows that match best."""
        if not queries:
            return []
        scores, rows = self._index.search(
            self._encoder.queries([unicodedata.normalize("NFKC", query) for query in queries]),
            min(top_k, self._index.ntotal),
        )
        return [list(zip(r, s, strict=True)) for r, s in zip(rows.tolist(), scores.tolist(), strict=True)]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError("search by vectors needs FAISS; install it with: pip install 'agentr[dense]'") from error
    return faiss
