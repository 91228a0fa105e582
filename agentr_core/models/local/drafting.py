"""Drafts the next tokens of a reply from earlier text (speculative decoding): the tokens of a draft
are fed to the model together, and those that it would have chosen itself are kept.

An agent repeats itself and its environment: actions name what observations and goals named, and the
episodes of a task are much alike. So the last tokens of a reply are looked up where they occurred
before (prompt lookup decoding; arXiv 2304.04487, arXiv 2411.04975), which takes no second model. A
draft never changes a reply: a token counts only if it is the one that the reply's own random number
chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

_PAIR = 2
_LONGER = (4, 3)
"""How many last tokens are looked up in other episodes before the last pair is looked up in the
episode itself: the continuation of a longer match is right more often.
"""
_MOST_NOTED = 300_000
_PAYS = 1.6
"""The mean number of tokens that a reply must gain from a step with drafts for drafts to be worth
their time.
"""
_MOST_SKIPPED = 7
"""The most steps without drafts in a row; the next one has them again, as a test."""
_REMEMBERED = 8
"""About how many of the latest steps with drafts the mean is taken over."""


class History:
    """The tokens of a prompt and of its reply so far, with an index of where each pair of tokens
    last occurred.
    """

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
        """Return up to `length` tokens that followed the last pair of tokens at its previous
        occurrence; none if there is none.
        """
        at = self._after.get(tuple(self.tokens[-_PAIR:]))  # type: ignore[arg-type]
        return () if at is None else self.tokens[at : at + length]


class Drafts:
    """Continuations of the last two to four tokens, from the replies of this model, and a running
    estimate of whether drafts pay. Not thread-safe.

    Args:
        length: the most tokens of a draft.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._continuations: dict[tuple[int, ...], tuple[int, ...]] = {}
        # The largest possible value, so that drafts are tried at first.
        self._mean_tokens = float(1 + length)
        self._steps_skipped = 0

    def due(self) -> bool:
        """Return whether the next step should have drafts; call it once a step. While drafts do not
        pay, one step in eight has them, to find out whether they pay again.
        """
        self._steps_skipped = (
            0 if self._mean_tokens >= _PAYS or self._steps_skipped == _MOST_SKIPPED else self._steps_skipped + 1
        )
        return self._steps_skipped == 0

    def update(self, mean: float) -> None:
        """Record the mean number of tokens that the replies gained from a step with drafts."""
        self._mean_tokens += (mean - self._mean_tokens) / _REMEMBERED

    def draft(self, history: History) -> Sequence[int]:
        """Return up to `length` tokens that may come next; none if there is no guess."""
        last = history.tokens[-_LONGER[0] :]
        for size in _LONGER:
            if (guess := self._continuations.get(tuple(last[-size:]))) is not None:
                return guess
        return history.repeated(self.length) or self._continuations.get(tuple(last[-_PAIR:]), ())

    def note(self, history: History, start: int) -> None:
        """Store the continuations in a finished reply, which begins at index `start` of its
        history's tokens.
        """
        tokens = history.tokens
        for size in (*_LONGER, _PAIR):
            for at in range(max(start, size), len(tokens)):
                key = tuple(tokens[at - size : at])
                # Inserted again at the end, so that the oldest entries are dropped first.
                self._continuations.pop(key, None)
                self._continuations[key] = tuple(tokens[at : at + self.length])
        if len(self._continuations) > _MOST_NOTED:
            for key in list(islice(self._continuations, _MOST_NOTED // 4)):
                del self._continuations[key]
