"""Texts in normal form, and documents as a model reads them, with bounded length."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from agentr_core.tools.search.corpus import Document

_MARK = "..."


def normalised(text: str) -> str:
    """Return a query, or a document to be found, in normal form: compatible characters unified, in
    lower case, with single spaces.

    Punctuation stays, since it distinguishes C from C++.
    """
    # Folding may take a composed character apart, so a second pass puts it together again.
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters; one that was cut ends with three dots."""
    return text if len(text) <= most else text[: max(0, most - len(_MARK))].rstrip() + _MARK[:most]


def shown(documents: Iterable[Document], *, document_chars: int) -> str:
    """Return documents as one text, each of at most `document_chars` characters, with blank lines
    between them.
    """
    return "\n\n".join(cut(document.text.strip(), document_chars) for document in documents)
