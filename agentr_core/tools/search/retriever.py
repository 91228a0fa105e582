"""Retrieval from a corpus: by words (BM25) or by vectors. An index is built in memory, or cached on
disk under the hash of its inputs.
"""

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
from agentr_core.system import content_sha256, move_into_place, report_write_errors
from agentr_core.texts import lone_surrogate, path_for_message

# bm25s, the library that indexes words, is imported without JAX.
#
# If JAX is installed, importing bm25s runs a first computation in it, and JAX then reserves three
# quarters of the memory of each GPU (105 of 140 GB on an H200), which models in the same process
# then lack. The parts of bm25s that are used here need no JAX.


@contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Make imports of a module fail as if it were not installed."""
    module = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


with _hide_module("jax"):
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN
    from bm25s.tokenization import Tokenized


# Texts as vectors: the mean of a model's last hidden states over the tokens of a text.

_BATCH_SIZE: Final = 64
_TOKENIZER_FILES: Final = ("tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model")

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The prefixes that are put before texts, and the number of tokens at which they are truncated.
    The defaults are those of E5.

    Source: Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training", 2022.
    """

    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    query_tokens: int = 128
    passage_tokens: int = 512


class Encoder:
    """A transformer in a Hugging Face model directory, in float32, that encodes texts as vectors.
    Thread-safe; one batch is encoded at a time.

    `settings` are all inputs that the vectors depend on, and `dimension` is their dimension.
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
            "tokenizer": {name: file_sha256(path / name) for name in _TOKENIZER_FILES if (path / name).is_file()},
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
        self.dimension = int(model.config.hidden_size)
        self._device = device
        self._lock = threading.Lock()

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of queries, of Euclidean length 1, as an array of shape (number of
        texts, `dimension`).
        """
        return self._encode([self.encoding.query_prefix + text for text in texts], self.encoding.query_tokens)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of passages, of Euclidean length 1, as an array of shape (number of
        texts, `dimension`).
        """
        return self._encode([self.encoding.passage_prefix + text for text in texts], self.encoding.passage_tokens)

    def _encode(self, texts: Sequence[str], max_tokens: int) -> Vectors:
        import torch

        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        # Texts of similar length share a batch, so that there is little padding.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(order), _BATCH_SIZE):
            batch = order[start : start + _BATCH_SIZE]
            options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": max_tokens}
            with self._lock, torch.inference_mode():
                inputs = self._tokenizer([texts[number] for number in batch], return_tensors="pt", **options)
                inputs = inputs.to(self._device)
                hidden_states = self._model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1).to(hidden_states.dtype)
                mean = (hidden_states * mask).sum(1) / mask.sum(1)
                vectors[batch] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return vectors


# Rankings of the documents of a corpus by how well they match a query. A document is identified by
# its row, its position in the corpus, from 0.

Ranking = list[tuple[int, float]]
"""Rows with their scores, the best first."""


class Ranker(Protocol):
    """A method that ranks the documents of one corpus by a query. Thread-safe."""

    @property
    def name(self) -> str:
        """The name of the provider in calls of the search tool."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings, apart from the corpus, on which the ranking depends."""
        ...

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return for each query at most `top_k` rows with their scores, the best first."""
        ...


def top_rows(scores: NDArray[np.float32], top_k: int) -> Ranking:
    """Return the `top_k` rows with the highest scores, the best first; of equal scores the earlier
    row first. Rows with a score of 0 or less are left out.
    """
    threshold = np.partition(scores, -top_k)[-top_k] if len(scores) > top_k else 0.0
    candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
    rows = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return list(zip(rows.tolist(), scores[rows].tolist(), strict=True))


# Ranking by vectors: the inner product with each document's vector, in a flat FAISS index (exact
# search).

DENSE_VERSION: Final = 2
"""To be increased when the same documents and encoder would give different vectors."""
_BUILD_BATCH_SIZE: Final = 4096


class DenseRanker:
    """Ranks documents by the cosine similarity of their vectors to a query's. Thread-safe."""

    name = "dense"

    def __init__(self, encoder: Encoder, index: Any) -> None:
        self.settings = {"version": DENSE_VERSION, **encoder.settings}
        self._encoder = encoder
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str], encoder: Encoder) -> DenseRanker:
        """Encode the texts of all documents, and return their ranking. Raises `ConfigError` when
        FAISS is not installed.
        """
        index = _faiss().IndexFlatIP(encoder.dimension)
        remaining = iter(texts)
        while batch := list(islice(remaining, _BUILD_BATCH_SIZE)):
            index.add(encoder.passages([unicodedata.normalize("NFKC", text) for text in batch]))
        return cls(encoder, index)

    @classmethod
    def load(cls, file: Path, encoder: Encoder, *, num_rows: int) -> DenseRanker:
        """Return a ranking with the vectors in a FAISS file, which another program may have made.

        Args:
            num_rows: the number of documents in the corpus; the file must have a vector for each,
                in the order of the corpus.

        Raises:
            DataFileError: the file cannot be read, is not a flat index of inner products, or does
                not fit the corpus or the encoder.
            ConfigError: FAISS is not installed.
        """
        faiss = _faiss()
        try:
            index = faiss.read_index(str(file))
        except RuntimeError as error:
            raise DataFileError(f"FAISS index {file} cannot be read; name a file that FAISS wrote") from error
        if not isinstance(index, faiss.IndexFlat) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DataFileError(f"{file} is a FAISS {type(index).__name__}; a flat index of inner products is needed")
        if (index.ntotal, index.d) != (num_rows, encoder.dimension):
            raise DataFileError(
                f"{file} has {index.ntotal} vectors of {index.d} numbers, but the corpus has {num_rows} documents and "
                f"the encoder makes {encoder.dimension} numbers; name the index of this corpus and encoder"
            )
        return cls(encoder, index)

    def save(self, file: Path) -> None:
        """Write the vectors into a FAISS file."""
        _faiss().write_index(self._index, str(file))

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return for each query the `top_k` rows with the highest similarity, the best first."""
        if not queries:
            return []
        scores_by_query, rows_by_query = self._index.search(
            self._encoder.queries([unicodedata.normalize("NFKC", query) for query in queries]),
            min(top_k, self._index.ntotal),
        )
        return [
            list(zip(rows, scores, strict=True))
            for rows, scores in zip(rows_by_query.tolist(), scores_by_query.tolist(), strict=True)
        ]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "search by vectors needs FAISS: in the checkout, pip install -c constraints.txt -e '.[dense]'"
        ) from error
    return faiss


# The documents to search: a JSONL file with one object per line, which is memory-mapped.

LineStarts = NDArray[np.int64]


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
    """The documents of a JSONL file, in its order. The file is memory-mapped, so that a large one
    needs little memory. Thread-safe.

    Args:
        starts: the byte offsets of the documents' lines, as from `scan_corpus`.
    """

    def __init__(self, path: Path, starts: LineStarts) -> None:
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
        return _parse_document(line, f"{self._path}, at byte {start}")


def scan_corpus(path: Path) -> Iterator[tuple[int, Document]]:
    """Yield each document of a corpus file with the byte offset of its line; blank lines are
    skipped.

    A line is an object with `id` (a string or an integer), `contents` (a string) and, optionally,
    `title` (a string).

    Raises `DataFileError` if the file cannot be read, has no document, or a line is malformed.
    """
    has_documents = False
    start = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    has_documents = True
                    yield start, _parse_document(line, f"{path}:{number}")
                start += len(line)
    except OSError as error:
        raise DataFileError(
            f"corpus {path_for_message(path)} cannot be read ({error.strerror}); name a JSONL file"
        ) from error
    if not has_documents:
        raise DataFileError(f'corpus {path} has no document; write {{"id", "title", "contents"}} on each line')


def _parse_document(line: bytes, location: str) -> Document:
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
        _check_text(identifier, "id", location),
        _check_text(record.get("title") or "", "title", location, allow_blank=True),
        _check_text(record.get("contents"), "contents", location),
    )


def _check_text(value: Any, name: str, location: str, *, allow_blank: bool = False) -> str:
    if not isinstance(value, str) or not (allow_blank or value.strip()):
        problem = "missing" if value is None else "blank" if isinstance(value, str) else f"a {type(value).__name__}"
        raise DataFileError(f'{location}: "{name}" is {problem}; a document has the texts "id", "title" and "contents"')
    if (position := lone_surrogate(value)) is not None:
        raise DataFileError(f'{location}: "{name}" has half a surrogate pair at {position}; correct the text')
    return value


# The normal form of texts, and the text of documents for a model, of limited length.

_TRUNCATION_MARK = "..."


def normalise(text: str) -> str:
    """Return a query or the text of a document in normal form: NFKC, case-folded, with single
    spaces.

    Punctuation stays, since it distinguishes C from C++.
    """
    # Case folding may decompose characters; the second NFKC composes them again.
    folded_text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded_text).split())


def truncate(text: str, max_chars: int) -> str:
    """Return a text cut to at most `max_chars` characters. If it was cut, it ends with "..."."""
    return (
        text
        if len(text) <= max_chars
        else text[: max(0, max_chars - len(_TRUNCATION_MARK))].rstrip() + _TRUNCATION_MARK[:max_chars]
    )


def format_documents(documents: Iterable[Document], *, document_chars: int) -> str:
    """Return the texts of documents, each cut to at most `document_chars` characters, with blank
    lines between them. Without documents, return "".
    """
    return "\n\n".join(truncate(document.text.strip(), document_chars) for document in documents)


# Ranking by words: BM25, with the index of bm25s.
#
# Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, in
# Lucene's variant; k1 = 0.9 and b = 0.4 are usual for passages of an encyclopaedia.

BM25_VERSION: Final = 2
"""To be increased when the same documents would give another index or another ranking."""
_K1, _B = 0.9, 0.4
# Scripts without spaces between words: Chinese, Japanese, Thai, Lao, Burmese and Khmer. Korean has
# spaces, but its words take endings.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff"
)
# A single digit or letter is a word too, as in "house 7".
_WORD = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_UNSPACED_RUN = re.compile(rf"[{_UNSPACED}]+")
_STOPWORDS = frozenset(STOPWORDS_EN)
_STEM_CACHE_SIZE = 2**16
Analyser = Callable[[str], list[str]]
"""Returns the terms of a text, by which it is indexed and searched."""


def make_analyser(split_text: Callable[[str], Iterable[str]], *, stemmer: str) -> Analyser:
    """Return a thread-safe function that returns the terms of a text: the stems of the words that
    `split_text` finds in the text in lower case, without English stop words.

    Args:
        stemmer: the name of a Snowball stemmer, such as "english".
    """
    # Threads must not share a stemmer, but they may share a cache of stems, which has a lock.
    stem = lru_cache(_STEM_CACHE_SIZE)(lambda word: Stemmer.Stemmer(stemmer).stemWord(word))
    return lambda text: [stem(word) for word in split_text(text.lower()) if word not in _STOPWORDS]


def split_words(text: str) -> Iterator[str]:
    """Yield the words of a text in normal form (see `normalise`). In the scripts of `_UNSPACED`,
    each character is a word, and so is each pair of adjacent characters.
    """
    for word in _WORD.findall(normalise(text)):
        if _UNSPACED_RUN.match(word):
            yield from word
            yield from map("".join, pairwise(word))
        else:
            yield word


ENGLISH = make_analyser(split_words, stemmer="english")


# bm25s needs only numpy and memory-maps its index; the alternative, rank-bm25, keeps the words of
# all documents in Python lists, and reads all of them for each query.
class Bm25Ranker:
    """Ranks documents by the words that they share with a query (BM25). Thread-safe."""

    name = "bm25"

    def __init__(self, index: Any, analyse: Analyser) -> None:
        self.settings = {"version": BM25_VERSION, "k1": _K1, "b": _B}
        self._index = index
        self._vocabulary: dict[str, int] = index.vocab_dict
        self._analyse = analyse

    @classmethod
    def build(cls, texts: Iterable[str], analyse: Analyser = ENGLISH) -> Bm25Ranker:
        """Index the texts of all documents, and return their ranking. The terms of all texts are
        held in memory, as 4-byte numbers. Raises `DataFileError` if no text has a term.
        """
        vocabulary: dict[str, int] = {}
        token_ids = [
            array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in analyse(text)]) for text in texts
        ]
        if not vocabulary:
            raise DataFileError("no document of the corpus has a word that it can be found by; give it other documents")
        index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
        # bm25s sets the level of its logger to DEBUG, and would print a line for each index.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        index.index(Tokenized(ids=token_ids, vocab=vocabulary), create_empty_token=False, show_progress=False)
        return cls(index, analyse)

    @classmethod
    def load(cls, folder: Path, analyse: Analyser = ENGLISH) -> Bm25Ranker:
        """Return the ranking that `save` wrote; the postings stay on disk, memory-mapped. `analyse`
        must be the analyser that it was built with. Raises `DataFileError` when the index is
        damaged.
        """
        try:
            return cls(bm25s.BM25.load(folder, mmap=True, show_progress=False), analyse)
        except (OSError, ValueError, KeyError) as error:
            raise DataFileError(f"index {folder} is damaged ({error}); delete it to have it rebuilt") from error

    def save(self, folder: Path) -> None:
        """Write the index into a new folder."""
        self._index.save(folder, show_progress=False)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return for each query the `top_k` rows with the highest scores, the best first; rows that
        share no term with it are left out.
        """
        rankings: list[Ranking] = []
        for query in queries:
            token_ids = [self._vocabulary[word] for word in self._analyse(query) if word in self._vocabulary]
            rankings.append(top_rows(self._index.get_scores_from_ids(token_ids), top_k) if token_ids else [])
        return rankings


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that a search found; a higher `score` is a better match."""

    document: Document
    score: float


class Retriever:
    """A search engine for one corpus. Thread-safe.

    Retrievers with the same `fingerprint`, a hash of the corpus and the settings of the ranking,
    return the same results.

    Args:
        corpus_hash: a hash of the documents.
    """

    def __init__(self, documents: Sequence[Document], ranker: Ranker, *, corpus_hash: str) -> None:
        self.name = ranker.name
        self.fingerprint = fingerprint(ranker.name, ranker.settings, corpus_hash)
        self._documents = documents
        self._ranker = ranker

    @classmethod
    def from_documents(cls, documents: Iterable[Document]) -> Retriever:
        """Return a BM25 search engine for documents in memory, such as those of a generated
        environment. Raises `DataFileError` if no document has a term.
        """
        stored_documents = tuple(documents)
        return cls(
            stored_documents,
            Bm25Ranker.build(document.text for document in stored_documents),
            corpus_hash=fingerprint(stored_documents),
        )

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return for each query at most `top_k` (1 or more) documents, the best first."""
        return [
            [Hit(self._documents[row], score) for row, score in ranking]
            for ranking in self._ranker.rank(queries, top_k)
        ]


def open_retriever(
    corpus: Path, cache: Path, *, encoder: Encoder | None = None, vectors: Path | None = None
) -> Retriever:
    """Return a search engine for a corpus file. Its index is built if the cache has none for the
    same content.

    Args:
        cache: the folder of the cache, created if it does not exist.
        encoder: if given, documents are ranked by its vectors instead of by words.
        vectors: a FAISS file with the vectors of `encoder`, used in place of an index built here.

    Raises:
        DataFileError: the corpus is missing or malformed, an index in the cache is damaged, or
            `vectors` cannot be read or does not fit the corpus or the encoder.
        ConfigError: `vectors` is given without an encoder, or FAISS is not installed.
        DiskError: the cache cannot be written.
    """
    if vectors is not None and encoder is None:
        raise ConfigError("vectors of FAISS need the encoder that made them, for queries; name its directory")
    with report_write_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if not corpus.is_file():
        raise DataFileError(f"corpus {path_for_message(corpus)} does not exist; name a JSONL file")
    content_hash = content_sha256(corpus, cache)
    documents = CorpusFile(
        corpus, _load_starts(_cached_path(cache, ("starts", content_hash), lambda file: _save_starts(corpus, file)))
    )
    texts = (document.text for document in documents)
    if encoder is None:
        index_path = _cached_path(
            cache, ("bm25", BM25_VERSION, content_hash), lambda folder: Bm25Ranker.build(texts).save(folder)
        )
        return Retriever(documents, Bm25Ranker.load(index_path), corpus_hash=content_hash)
    if vectors is not None:
        corpus_hash = fingerprint(content_hash, content_sha256(vectors, cache) if vectors.is_file() else "")
        return Retriever(
            documents, DenseRanker.load(vectors, encoder, num_rows=len(documents)), corpus_hash=corpus_hash
        )
    index_path = _cached_path(
        cache,
        ("dense", DENSE_VERSION, encoder.settings, content_hash),
        lambda file: DenseRanker.build(texts, encoder).save(file),
    )
    return Retriever(
        documents, DenseRanker.load(index_path, encoder, num_rows=len(documents)), corpus_hash=content_hash
    )


def _cached_path(cache: Path, identity: tuple[Any, ...], write: Callable[[Path], None]) -> Path:
    """Return the path of the file or folder with this identity in a cache. If it does not exist,
    `write` is called with a temporary path to write it. Raises `DiskError` if it cannot be written.
    """
    path = cache / f"{identity[0]}-{fingerprint(*identity)}"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as draft, report_write_errors(path):
            write(Path(draft) / path.name)
            move_into_place(Path(draft) / path.name, path)
    return path


def _load_starts(file: Path) -> LineStarts:
    try:
        starts: LineStarts = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise DataFileError(f"index {file} is damaged ({error}); delete it to have it rebuilt") from error
    return starts


def _save_starts(corpus: Path, file: Path) -> None:
    with file.open("wb") as stream:
        np.save(stream, np.fromiter((start for start, _ in scan_corpus(corpus)), dtype=np.int64))
