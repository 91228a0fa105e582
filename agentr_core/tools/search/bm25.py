"""Ranking by words: BM25 on the index of a library.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, in
Lucene's form; k1 = 0.9 and b = 0.4 are usual for passages of an encyclopaedia.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import Stemmer

from agentr_core.errors import DataFileError
from agentr_core.tools.search.library import STOPWORDS_EN, Tokenized, bm25s
from agentr_core.tools.search.ranking import Ranked, best
from agentr_core.tools.search.text import normalised

VERSION: Final = 2
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


class Bm25:
    """A ranking of documents by the words that they share with a query. Threads may share it."""

    name = "bm25"

    def __init__(self, index: Any, words: Analyser) -> None:
        self.settings = {"version": VERSION, "k1": _K1, "b": _B}
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
        return [self._rank(query, top_k) for query in queries]

    def _rank(self, query: str, top_k: int) -> Ranked:
        tokens = [self._vocabulary[word] for word in self._words(query) if word in self._vocabulary]
        return best(self._index.get_scores_from_ids(tokens), top_k) if tokens else []
