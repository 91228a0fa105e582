"""BM25 search over products: the published field and parameters, on a library's index.

The published engine is Lucene. Here, words are split, stemmed and filtered by stop words as in its
English analyser, but not in every corner case, so ranks can differ from published ones.

Source: WebShop's search engine (Pyserini's defaults): k1 0.9, b 0.4, at most 50 results.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import Stemmer

from agentr_core.environments.webshop.files import Product
from agentr_core.errors import DataFileError
from agentr_core.tools.search.library import STOPWORDS_EN, Tokenized, bm25s

MAX_RESULTS = 50
_K1, _B = 0.9, 0.4
_WORD = re.compile(r"\w+(?:['\u2019.]\w+)*")
_POSSESSIVE = re.compile(r"['\u2019]s$")


def document(product: Product) -> str:
    """Return the searched text of a product: title, description, first bullet and options, in lower
    case.
    """
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join([product.title, product.description, first, options]).lower()


def build(documents: Iterable[str], folder: Path) -> None:
    """Write the index of documents into a folder; meanwhile, all their words are held in memory as
    numbers.
    """
    stem = Stemmer.Stemmer("porter").stemWord
    vocabulary: dict[str, int] = {}
    ids: dict[str, int] = {}
    rows = []
    for text in documents:
        row = array("i")
        for word in _words(text):
            if word not in ids:
                ids[word] = vocabulary.setdefault(stem(word), len(vocabulary))
            row.append(ids[word])
        rows.append(row)
    retriever = bm25s.BM25(k1=_K1, b=_B, method="lucene")
    retriever.index(Tokenized(ids=rows, vocab=vocabulary), create_empty_token=False, show_progress=False)
    retriever.save(folder, show_progress=False)


class SearchIndex:
    """An index in a folder. Postings stay on disk and are paged in as queries need them."""

    def __init__(self, folder: Path) -> None:
        """Open the index. Raises `DataFileError` when it is missing or damaged."""
        try:
            self._retriever = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError) as error:
            raise DataFileError(f"search index {folder} is damaged ({error}); delete it to have it rebuilt") from error
        self._stem = Stemmer.Stemmer("porter").stemWord

    def search(self, query: str) -> tuple[int, ...]:
        """Return the rows of the products that match best, at most 50, the best first; ties go to
        the earlier row.
        """
        tokens = self._retriever.get_tokens_ids([self._stem(word) for word in _words(query.lower())])
        if not tokens:
            return ()
        scores = self._retriever.get_scores_from_ids(tokens)
        least = np.partition(scores, -MAX_RESULTS)[-MAX_RESULTS] if len(scores) > MAX_RESULTS else 0.0
        found = np.flatnonzero((scores >= least) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:MAX_RESULTS]
        return tuple(int(row) for row in best)


def _words(text: str) -> list[str]:
    words = (_POSSESSIVE.sub("", word) for word in _WORD.findall(text))
    return [word for word in words if word not in STOPWORDS_EN]
