"""Stop strings: where a reply is cut, and a cheap test of whether a new token can have completed
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentr_core.types import Sampling


def cut_at_stop(text: str, sampling: Sampling) -> str:
    """Return the text up to the first stop string, including it if `sampling` says so; the whole
    text when there is none.
    """
    found = [(at, at + len(stop)) for stop in sampling.stop if (at := text.find(stop)) >= 0]
    if not found:
        return text
    start, end = min(found)
    return text[: end if sampling.include_stop else start]


class StopWatch:
    """A detector of the first token after which a reply contains a stop string.

    Decoding a whole reply at every token is slow, so it is done only after a token whose own text
    could hold the last character of a stop string. `decode` turns token ids into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def completed(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Return whether the text of `ids` contains a stop string, given that the text of
        `ids[:-1]` does not.
        """
        if not any(self._may_end(ids[-1], stop) for stop in stops):
            return False
        text = self._decode(ids)
        return any(stop in text for stop in stops)

    def _may_end(self, token: int, stop: str) -> bool:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode((token,))
        # Decoded alone, a token may lose its leading space or be part of a character: then only the
        # whole text can tell.
        return stop[-1] in piece or stop[-1].isspace() or not piece or "\N{REPLACEMENT CHARACTER}" in piece
