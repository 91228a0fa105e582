"""A corpus with a ranking: made in memory, or kept on disk under the hash of its inputs."""

from __future__ import annotations

import json
import logging
import mmap
import re
import sys
import tempfile
import threading
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, Protocol, overload

import numpy as np
import Stemmer
from numpy.typing import NDArray

from agentr_core.errors import ConfigError, DataFileError, ModelDirectoryError
from agentr_core.fingerprint import file_sha256, fingerprint
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.system import content_sha256, publish, writing
from agentr_core.texts import lone_surrogate, placed

# The library that indexes words, imported without JAX.
#
# Where JAX is installed, bm25s asks it for a first result as soon as it is imported, and JAX then
# reserves three quarters of each GPU: on an H200 105 of 140 GB, which models in the same process
# lacked. What is used of bm25s needs no JAX.


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


# Encodes texts as vectors: the mean of a model's last hidden states.

_BATCH: Final = 64
_TOKENIZERS: Final = ("tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model")

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The form in which an encoder gets texts; the defaults are those of E5, which marks queries
    and passages.

    Source: Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training", 2022.
    """

    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    query_tokens: int = 128
    passage_tokens: int = 512


class Encoder:
    """A transformer of a Hugging Face model directory, in float32. Threads may share it; they take
    turns.
    """

    def __init__(self, path: Path, encoding: Encoding | None = None, *, device: str = "cpu") -> None:
        """Load the model. Raises `ModelDirectoryError` when the directory is incomplete,
        `ConfigError` for a device that does not exist.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.encoding = encoding or Encoding()
        self.settings = {
            "weights": weights_sha256(path),
            "tokenizer": {name: file_sha256(path / name) for name in _TOKENIZERS if (path / name).is_file()},
            "encoding": self.encoding,
        }
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            model: Any = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            raise ModelDirectoryError(
                f"the encoder in {path} cannot be loaded ({str(error).splitlines()[0]}); name a model directory"
            ) from error
        try:
            self._model = model.eval().to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"the encoder cannot be put on device {device!r} ({error}); name another") from error
        self.size = int(model.config.hidden_size)
        self._device = device
        self._turn = threading.Lock()

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return a row of unit length for each query, of shape (texts, `size`)."""
        return self._encode([self.encoding.query_prefix + text for text in texts], self.encoding.query_tokens)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Return a row of unit length for each passage, of shape (texts, `size`)."""
        return self._encode([self.encoding.passage_prefix + text for text in texts], self.encoding.passage_tokens)

    def _encode(self, texts: Sequence[str], most_tokens: int) -> Vectors:
        import torch

        rows = np.zeros((len(texts), self.size), dtype=np.float32)
        # Texts of similar length go together, so that there is little padding.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": most_tokens}
            with self._turn, torch.inference_mode():
                inputs = self._tokenizer([texts[number] for number in batch], return_tensors="pt", **options)
                inputs = inputs.to(self._device)
                hidden_states = self._model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1).to(hidden_states.dtype)
                mean = (hidden_states * mask).sum(1) / mask.sum(1)
                rows[batch] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return rows


# Rankings of the rows of a corpus by how well they match a query.

Ranked = list[tuple[int, float]]
"""Rows with their scores, the best first; with equal scores the earlier row first."""


class Ranker(Protocol):
    """A ranking of the rows of one corpus. Threads may share it."""

    @property
    def name(self) -> str:
        """The name of the provider in calls of the search tool."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that decide the ranking, besides the corpus."""
        ...

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranked]:
        """Return at most `top_k` rows for each query."""
        ...


def best(scores: NDArray[np.float32], top_k: int) -> Ranked:
    """Return the rows with the `top_k` highest scores above 0."""
    threshold = np.partition(scores, -top_k)[-top_k] if len(scores) > top_k else 0.0
    candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
    rows = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return list(zip(rows.tolist(), scores[rows].tolist(), strict=True))


# Ranking by meaning: the inner product of vectors on a flat FAISS index, which compares a query
# with every document.

DENSE_VERSION: Final = 2
"""To be raised when the same documents and encoder would give other vectors."""
_AT_ONCE: Final = 4096


class Dense:
    """A ranking of documents by the cosine between their vectors and a query's. Threads may share
    it.
    """

    name = "dense"

    def __init__(self, encoder: Encoder, index: Any) -> None:
        self.settings = {"version": DENSE_VERSION, **encoder.settings}
        self._encoder = encoder
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str], encoder: Encoder) -> Dense:
        """Return the ranking of texts. Raises `ConfigError` when FAISS is not installed."""
        index = _faiss().IndexFlatIP(encoder.size)
        remaining = iter(texts)
        while batch := list(islice(remaining, _AT_ONCE)):
            index.add(encoder.passages([unicodedata.normalize("NFKC", text) for text in batch]))
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
        raise ConfigError(
            "search by vectors needs FAISS: in the checkout, pip install -c constraints.txt -e '.[dense]'"
        ) from error
    return faiss


# The documents to search: a JSONL file with one object per line, read in place.

Starts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of a corpus, or a page that a web search found. `title` may be empty."""

    id: str
    title: str
    contents: str

    @property
    def text(self) -> str:
        """The text that is searched and shown: the title, if any, on its own line, and the
        contents.
        """
        return f"{self.title}\n{self.contents}" if self.title else self.contents


class CorpusFile(Sequence[Document]):
    """The documents of a file in its order. The file is memory-mapped, so that any size costs
    little memory; threads may share it.

    Args:
        starts: the byte offset of each document's line; see `scan`.
    """

    def __init__(self, path: Path, starts: Starts) -> None:
        self._path = path
        self._starts = starts
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> Document: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Document]: ...
    def __getitem__(self, row: int | slice) -> Document | Sequence[Document]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        start = int(self._starts[row])
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : len(self._bytes) if end < 0 else end]
        return _document(line, f"{self._path}, at byte {start}")


def scan(path: Path) -> Iterator[tuple[int, Document]]:
    """Yield each document of a corpus file with the byte offset of its line; blank lines are
    skipped.

    A line is an object with the texts `id` (or a whole number) and `contents`, and optionally
    `title`.

    Raises `DataFileError` if the file cannot be read, has no document, or a line is malformed.
    """
    has_documents = False
    start = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    has_documents = True
                    yield start, _document(line, f"{path}:{number}")
                start += len(line)
    except OSError as error:
        raise DataFileError(f"corpus {placed(path)} cannot be read ({error.strerror}); name a JSONL file") from error
    if not has_documents:
        raise DataFileError(f'corpus {path} has no document; write {{"id", "title", "contents"}} on each line')


def _document(line: bytes, location: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{location} is not JSON in UTF-8 ({error}); write one object on each line") from None
    if not isinstance(record, dict):
        raise DataFileError(f"{location} is a {type(record).__name__}; write one JSON object on each line")
    identifier = record.get("id")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    return Document(
        _text(identifier, "id", location),
        _text(record.get("title") or "", "title", location, blank=True),
        _text(record.get("contents"), "contents", location),
    )


def _text(value: Any, name: str, location: str, *, blank: bool = False) -> str:
    if not isinstance(value, str) or not (blank or value.strip()):
        problem = "missing" if value is None else "blank" if isinstance(value, str) else f"a {type(value).__name__}"
        raise DataFileError(f'{location}: "{name}" is {problem}; a document has the texts "id", "title" and "contents"')
    if (position := lone_surrogate(value)) is not None:
        raise DataFileError(f'{location}: "{name}" has half a surrogate pair at {position}; correct the text')
    return value


# Texts in normal form, and documents as a model reads them, with bounded length.

_MARK = "..."


def normalised(text: str) -> str:
    """Return a query, or a document to be found, in normal form: compatible characters unified, in
    lower case, with single spaces.

    Punctuation stays, since it distinguishes C from C++.
    """
    # Folding may take a composed character apart, so a second pass puts it together again.
    folded_text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded_text).split())


def truncate(text: str, max_chars: int) -> str:
    """Return a text of at most `max_chars` characters; one that was cut ends with three dots."""
    return text if len(text) <= max_chars else text[: max(0, max_chars - len(_MARK))].rstrip() + _MARK[:max_chars]


def format_documents(documents: Iterable[Document], *, document_chars: int) -> str:
    """Return documents as one text, each of at most `document_chars` characters, with blank lines
    between them.
    """
    return "\n\n".join(truncate(document.text.strip(), document_chars) for document in documents)


# Ranking by words: BM25 on the index of a library.
#
# Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, in
# Lucene's form; k1 = 0.9 and b = 0.4 are usual for passages of an encyclopaedia.

BM25_VERSION: Final = 2
"""To be raised when the same documents would give another index or another ranking."""
_K1, _B = 0.9, 0.4
# Chinese, Japanese, Thai, Lao, Burmese and Khmer have no spaces between words; Korean has endings.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff"
)
# A digit or a letter alone is a word too: "house 7".
_WORD = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_RUN = re.compile(rf"[{_UNSPACED}]+")
_STOPWORDS = frozenset(STOPWORDS_EN)
_STEMS = 2**16
Analyser = Callable[[str], list[str]]
"""Returns the words of a text by which it can be found."""


def analyser(split: Callable[[str], Iterable[str]], *, stemmer: str) -> Analyser:
    """Return a function that gives the stems of the words that `split` finds in a text in lower
    case, without the most frequent English words. Threads may share it.
    """
    # Two threads must not share a stemmer, but they may share a cache of stems, which has a lock.
    stem = lru_cache(_STEMS)(lambda word: Stemmer.Stemmer(stemmer).stemWord(word))
    return lambda text: [stem(word) for word in split(text.lower()) if word not in _STOPWORDS]


def split(text: str) -> Iterator[str]:
    """Yield the words of a text in the normal form of queries. In the scripts of
    `_UNSPACED`, each character and each pair of neighbours is a word.
    """
    for word in _WORD.findall(normalised(text)):
        if _RUN.match(word):
            yield from word
            yield from map("".join, pairwise(word))
        else:
            yield word


ENGLISH = analyser(split, stemmer="english")


# Of the libraries, bm25s needs numpy alone and maps its index into memory; rank-bm25 keeps the
# words of all documents in Python lists, and reads them all for each query.
class Bm25:
    """A ranking of documents by the words that they share with a query. Threads may share it."""

    name = "bm25"

    def __init__(self, index: Any, words: Analyser) -> None:
        self.settings = {"version": BM25_VERSION, "k1": _K1, "b": _B}
        self._index = index
        self._vocabulary: dict[str, int] = index.vocab_dict
        self._words = words

    @classmethod
    def build(cls, texts: Iterable[str], words: Analyser = ENGLISH) -> Bm25:
        """Return the ranking of texts; meanwhile their words are held in memory as numbers. Raises
        `DataFileError` when no text has a word to search for.
        """
        vocabulary: dict[str, int] = {}
        rows = [array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)]) for text in texts]
        if not vocabulary:
            raise DataFileError("no document of the corpus has a word that it can be found by; give it other documents")
        index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
        # The library sets its level to DEBUG, and would report each index to the terminal.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        index.index(Tokenized(ids=rows, vocab=vocabulary), create_empty_token=False, show_progress=False)
        return cls(index, words)

    @classmethod
    def load(cls, folder: Path, words: Analyser = ENGLISH) -> Bm25:
        """Return the ranking that `save` wrote, given the words that it was built with; postings
        stay on disk. Raises `DataFileError` when the index is damaged.
        """
        try:
            return cls(bm25s.BM25.load(folder, mmap=True, show_progress=False), words)
        except (OSError, ValueError, KeyError) as error:
            raise DataFileError(f"index {folder} is damaged ({error}); delete it to have it rebuilt") from error

    def save(self, folder: Path) -> None:
        """Write the index into a folder, which is created."""
        self._index.save(folder, show_progress=False)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranked]:
        """Return for each query the rows that match best; rows that share no word with it are left
        out.
        """
        rankings: list[Ranked] = []
        for query in queries:
            tokens = [self._vocabulary[word] for word in self._words(query) if word in self._vocabulary]
            rankings.append(best(self._index.get_scores_from_ids(tokens), top_k) if tokens else [])
        return rankings


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
        stored_documents = tuple(documents)
        return cls(
            stored_documents,
            Bm25.build(document.text for document in stored_documents),
            corpus=fingerprint(stored_documents),
        )

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return for each query at most `top_k` documents, the best first; `top_k` is at least
        1.
        """
        return [
            [Hit(self._documents[row], score) for row, score in ranking]
            for ranking in self._ranker.rank(queries, top_k)
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
    documents = CorpusFile(
        corpus, _starts(_cached(cache, ("starts", content), lambda file: _save_starts(corpus, file)))
    )
    texts = (document.text for document in documents)
    if encoder is None:
        index_path = _cached(cache, ("bm25", BM25_VERSION, content), lambda folder: Bm25.build(texts).save(folder))
        return Retriever(documents, Bm25.load(index_path), corpus=content)
    if vectors is not None:
        corpus_hash = fingerprint(content, content_sha256(vectors, cache) if vectors.is_file() else "")
        return Retriever(documents, Dense.load(vectors, encoder, rows=len(documents)), corpus=corpus_hash)
    index_path = _cached(
        cache, ("dense", DENSE_VERSION, encoder.settings, content), lambda file: Dense.build(texts, encoder).save(file)
    )
    return Retriever(documents, Dense.load(index_path, encoder, rows=len(documents)), corpus=content)


def _cached(cache: Path, identity: tuple[Any, ...], make: Callable[[Path], None]) -> Path:
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
