"""Guesses how a reply goes on, from what was said before: the tokens of a draft are fed together,
and those that the model would have chosen itself are kept.

An agent repeats itself and its world: actions name what observations and goals named, and the
episodes of a task are much alike. So the last tokens of a reply are looked up where they stood
before (prompt lookup decoding; arXiv 2304.04487, arXiv 2411.04975), which takes no second model. A
draft never changes a reply: a token counts only if it is the one that the reply's own random number
chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

_PAIR = 2
_LONGER = (4, 3)
"""The numbers of last tokens that are looked up in other episodes before the pair is looked up in
the episode itself: what followed more of them is right more often.
"""
_MOST_NOTED = 300_000
_PAYS = 1.6
"""Tokens of a reply a step, on average, for which a step with drafts is worth its time."""
_MOST_SKIPPED = 7
"""How many steps without drafts there are at most before one with them."""
_REMEMBERED = 8
"""About so many steps with drafts decide whether others follow."""


class History:
    """The tokens of a prompt and of its reply so far, and what last followed each pair of them."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, int], int] = {}
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        start = max(_PAIR, len(self.tokens))
        self.tokens.extend(tokens)
        pairs = zip(self.tokens[start - 2 : -2], self.tokens[start - 1 : -1], strict=True)
        self._after.update(zip(pairs, range(start, len(self.tokens)), strict=True))

    def repeated(self, length: int) -> Sequence[int]:
        """Return up to `length` tokens that followed the last pair when it stood here before; none
        if it is new.
        """
        at = self._after.get(tuple(self.tokens[-_PAIR:]))  # type: ignore[arg-type]
        return () if at is None else self.tokens[at : at + length]


class Drafts:
    """What followed the last two to four tokens in the replies of this model, and whether drafts
    pay. Not thread-safe.

    Args:
        length: the most tokens of a draft.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._continuations: dict[tuple[int, ...], tuple[int, ...]] = {}
        # The most there can be, so that drafts are tried at first.
        self._mean_tokens = float(1 + length)
        self._steps_skipped = 0

    def due(self) -> bool:
        """Return whether the next step is to have drafts: where they do not pay, one step in some
        has, to see whether they do again.
        """
        self._steps_skipped = (
            0 if self._mean_tokens >= _PAYS or self._steps_skipped == _MOST_SKIPPED else self._steps_skipped + 1
        )
        return self._steps_skipped == 0

    def update(self, mean: float) -> None:
        """Take note of how many tokens the replies had on average of a step with drafts."""
        self._mean_tokens += (mean - self._mean_tokens) / _REMEMBERED

    def draft(self, history: History) -> Sequence[int]:
        """Return up to `length` tokens with which the reply may go on; none without a guess."""
        last = history.tokens[-_LONGER[0] :]
        for size in _LONGER:
            if (guess := self._continuations.get(tuple(last[-size:]))) is not None:
                return guess
        return history.repeated(self.length) or self._continuations.get(tuple(last[-_PAIR:]), ())

    def note(self, history: History, start: int) -> None:
        """Remember a reply that begins at `start` of what was said."""
        tokens = history.tokens
        for size in (*_LONGER, _PAIR):
            for at in range(max(start, size), len(tokens)):
                key = tuple(tokens[at - size : at])
                # At its end again, so that what is dropped was said longest ago.
                self._continuations.pop(key, None)
                self._continuations[key] = tuple(tokens[at : at + self.length])
        if len(self._continuations) > _MOST_NOTED:
            for key in list(islice(self._continuations, _MOST_NOTED // 4)):
                del self._continuations[key]
