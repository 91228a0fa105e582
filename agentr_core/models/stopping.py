"""Where a reply is cut, and a cheap test of whether a new token can have brought it there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentr_core.texts import outside_thoughts
from agentr_core.types import Sampling


def cut_at_stop(text: str, sampling: Sampling) -> str:
    """Return the text up to the first stop string, including it if `sampling` says so, or up to the
    end of what `until` matches, if that comes first; the whole text when there is neither.
    """
    found = [(at, at + len(stop)) for stop in sampling.stop if (at := text.find(stop)) >= 0]
    if found:
        start, end = min(found)
        text = text[: end if sampling.include_stop else start]
    match = re.search(sampling.until, outside_thoughts(text)) if sampling.until else None
    return text if match is None else text[: match.end()]


def ids_within(ids: Sequence[int], text: str, text_of: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Return the fewest first ids whose text, as `text_of` gives it, has all of a text that they
    begin with.
    """
    count = len(ids)
    while count > 0 and len(text_of(ids[: count - 1])) >= len(text):
        count -= 1
    return tuple(ids[:count])


class StopWatch:
    """A detector of the first token after which a reply contains a stop string, or a match of
    `until`.

    Decoding a whole reply at every token is slow, so it is done only after a token whose own text
    could hold the last character of a stop string. `decode` turns token ids into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def completed(self, ids: Sequence[int], stops: Sequence[str], until: str = "") -> bool:
        """Return whether the text of `ids` contains a stop string or a match of `until`, given that
        the text of `ids[:-1]` does not.
        """
        matched = bool(until) and (self._may_end(ids[-1], ":") or "\n" in self._pieces[ids[-1]])
        if not matched and not any(self._may_end(ids[-1], stop) for stop in stops):
            return False
        text = self._decode(ids)
        return any(stop in text for stop in stops) or (matched and bool(re.search(until, outside_thoughts(text))))

    def _may_end(self, token: int, stop: str) -> bool:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode((token,))
        # Decoded alone, a token may lose its leading space or be part of a character: then only the
        # whole text can tell.
        return stop[-1] in piece or stop[-1].isspace() or not piece or "\N{REPLACEMENT CHARACTER}" in piece
