"""The page of a search: the texts that match, with their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentr_core.reports import addresses
from agentr_core.store import Store
from agentr_core.store.queries.places import Place, places_of_texts
from agentr_core.store.text_index import RANKED, Matches, found_texts, phrases
from agentr_core.viewer.page import Page

PAGE_ROWS: Final = 20
MOST_CHARS: Final = 300
"""The maximum length of a search."""
_AROUND: Final = 160
"""Characters that are shown before and after the first word that was found."""
_PLACES: Final = 4


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that was found: an extract in pieces, each with a flag for a search word, and the
    places of the text.
    """

    pieces: list[tuple[str, bool]]
    places: list[tuple[str, str]]
    """The name and the address of each place."""


def results(store: Store, words: str, matches: Matches, *, page: int, complete: bool) -> Page:
    """Return the page of a search; `complete` says whether all texts were in the index."""
    texts = found_texts(store, matches.rows)
    places = places_of_texts(store, [key for key, _ in texts], _PLACES) if texts else []
    values = {
        "words": words,
        "hits": [
            Hit(extract(text, phrases(words)), [_place(p) for p in places if p.text_id == key]) for key, text in texts
        ],
        "total": matches.total,
        "many": matches.total >= RANKED,
        "first": page * PAGE_ROWS + 1,
        "complete": complete,
        "previous": addresses.with_query("/search", {"q": words, "page": page - 1}) if page else None,
        "following": addresses.with_query("/search", {"q": words, "page": page + 1})
        if (page + 1) * PAGE_ROWS < matches.total
        else None,
    }
    return Page("search", values)


def extract(text: str, wanted: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the text around the first search word, in pieces, each with a flag for a search word;
    the beginning of the text if no search word occurs in it literally.
    """
    pattern = re.compile("|".join(re.escape(word) for word in wanted), re.IGNORECASE)
    first = pattern.search(text) if wanted else None
    middle = first.start() if first else 0
    start, end = max(0, middle - _AROUND), min(len(text), middle + 2 * _AROUND)
    shown = ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")
    pieces: list[tuple[str, bool]] = []
    at = 0
    for found in pattern.finditer(shown) if wanted else ():
        pieces += [(shown[at : found.start()], False), (found[0], True)]
        at = found.end()
    return [piece for piece in [*pieces, (shown[at:], False)] if piece[0]]


def _place(place: Place) -> tuple[str, str]:
    if place.kind == "node":
        return f"node {place.key[:8]}#{place.position}", f"/node/{place.key}/{place.position}"
    where = "" if place.position is None else f", {'message' if place.kind == 'sample' else 'step'} {place.position}"
    anchor = "" if place.position is None else f"#{place.position}"
    return f"{place.kind} {place.key[:8]}{where}", f"{addresses.page_of(place.kind, place.key)}{anchor}"
