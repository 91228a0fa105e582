"""What of a product is searched, and how its words are read.

The published engine is Lucene. Here, words are split, stemmed and filtered by stop words as in its
English analyser, but not in every corner case, so ranks can differ from published ones.

Source: WebShop's search engine (Pyserini's defaults): k1 0.9, b 0.4, at most 50 results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentr_core.environments.webshop.files import Product
from agentr_core.tools.search.bm25 import analyser

MAX_RESULTS = 50
_WORD = re.compile(r"\w+(?:['\u2019.]\w+)*")
_POSSESSIVE = re.compile(r"['\u2019]s$")


def document(product: Product) -> str:
    """Return the searched text of a product: title, description, first bullet and options, in lower
    case.
    """
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join([product.title, product.description, first, options]).lower()


def _split(text: str) -> Iterator[str]:
    return (_POSSESSIVE.sub("", word) for word in _WORD.findall(text))


WORDS = analyser(_split, stemmer="porter")
