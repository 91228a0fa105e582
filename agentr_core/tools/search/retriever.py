"""A corpus with a ranking: made in memory, or kept on disk under the hash of its inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import fingerprint
from agentr_core.texts import placed
from agentr_core.tools.search import bm25, dense
from agentr_core.tools.search.bm25 import Bm25
from agentr_core.tools.search.corpus import CorpusFile, Document, Starts, scan
from agentr_core.tools.search.dense import Dense
from agentr_core.tools.search.encoder import Encoder
from agentr_core.tools.search.ranking import Ranker
from agentr_core.writing import content_sha256, publish, writing


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that a query found; a higher `score` is a better match."""

    document: Document
    score: float


class Retriever:
    """A search over a corpus. Threads may share it.

    Retrievers with the same `fingerprint`, a hash of corpus and ranking, give the same answers.
    """

    def __init__(self, documents: Sequence[Document], ranker: Ranker, *, corpus: str) -> None:
        self.name = ranker.name
        self.fingerprint = fingerprint(ranker.name, ranker.settings, corpus)
        self._documents = documents
        self._ranker = ranker

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Retriever:
        """Return a BM25 search of documents in memory, such as those of a generated world."""
        held = tuple(documents)
        return cls(held, Bm25.build(each.text for each in held), corpus=fingerprint(held))

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return for each query at most `top_k` documents, the best first; `top_k` is at least
        1.
        """
        return [
            [Hit(self._documents[row], score) for row, score in ranked] for ranked in self._ranker.rank(queries, top_k)
        ]


def open_retriever(
    corpus: Path, cache: Path, *, encoder: Encoder | None = None, vectors: Path | None = None
) -> Retriever:
    """Return a search of a corpus file, whose index is built unless the cache has one for the same
    content.

    Args:
        cache: a folder, created if it does not exist.
        encoder: if given, the search is by its vectors instead of by words.
        vectors: a FAISS file made elsewhere, used instead of building one here.

    Raises:
        DataFileError: the corpus is missing or malformed, or `vectors` does not fit it.
        ConfigError: `vectors` is given without an encoder, or FAISS is not installed.
        DiskError: the cache cannot be written.
    """
    if vectors is not None and encoder is None:
        raise ConfigError("vectors of FAISS need the encoder that made them, for queries; name its directory")
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if not corpus.is_file():
        raise DataFileError(f"corpus {placed(corpus)} does not exist; name a JSONL file")
    content = content_sha256(corpus, cache)
    documents = CorpusFile(corpus, _starts(_made(cache, ("starts", content), lambda file: _save_starts(corpus, file))))
    texts = (document.text for document in documents)
    if encoder is None:
        made = _made(cache, ("bm25", bm25.VERSION, content), lambda folder: Bm25.build(texts).save(folder))
        return Retriever(documents, Bm25.load(made), corpus=content)
    if vectors is not None:
        told = fingerprint(content, content_sha256(vectors, cache) if vectors.is_file() else "")
        return Retriever(documents, Dense.load(vectors, encoder, rows=len(documents)), corpus=told)
    made = _made(
        cache, ("dense", dense.VERSION, encoder.settings, content), lambda file: Dense.build(texts, encoder).save(file)
    )
    return Retriever(documents, Dense.load(made, encoder, rows=len(documents)), corpus=content)


def _made(cache: Path, identity: tuple[Any, ...], make: Callable[[Path], None]) -> Path:
    """Return the file or folder of a cache with this identity; if it does not exist, `make` writes
    it.
    """
    path = cache / f"{identity[0]}-{fingerprint(*identity)}"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as draft, writing(path):
            make(Path(draft) / path.name)
            publish(Path(draft) / path.name, path)
    return path


def _starts(file: Path) -> Starts:
    try:
        starts: Starts = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise DataFileError(f"index {file} is damaged ({error}); delete it to have it rebuilt") from error
    return starts


def _save_starts(corpus: Path, file: Path) -> None:
    with file.open("wb") as stream:
        np.save(stream, np.fromiter((start for start, _ in scan(corpus)), dtype=np.int64))
