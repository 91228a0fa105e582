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
_LONG_LENGTHS = (4, 3)
"""How many last tokens are looked up in other episodes before the last pair is looked up in the
episode itself: the continuation of a longer match is right more often.
"""
_MAX_CONTINUATIONS = 300_000
_MIN_MEAN_TOKENS = 1.6
"""The mean number of tokens that a reply must gain from a step with drafts for drafts to be worth
their time.
"""
_MAX_SKIPPED_STEPS = 7
"""The most steps without drafts in a row; the next one has them again, as a test."""
_NUM_AVERAGED_STEPS = 8
"""About how many of the latest steps with drafts the mean is taken over."""


class History:
    """The tokens of a prompt and of its reply so far, with an index of where each pair of tokens
    last occurred.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._index_after_pair: dict[tuple[int, int], int] = {}
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        start = max(_PAIR, len(self.tokens))
        self.tokens.extend(tokens)
        pairs = zip(self.tokens[start - 2 : -2], self.tokens[start - 1 : -1], strict=True)
        self._index_after_pair.update(zip(pairs, range(start, len(self.tokens)), strict=True))

    def repeated_tokens(self, length: int) -> Sequence[int]:
        """Return up to `length` tokens that followed the last pair of tokens at its previous
        occurrence; none if there is none.
        """
        index = self._index_after_pair.get(tuple(self.tokens[-_PAIR:]))  # type: ignore[arg-type]
        return () if index is None else self.tokens[index : index + length]


class Drafter:
    """Continuations of the last two to four tokens, from the replies of this model, and a running
    estimate of whether drafts pay. Not thread-safe.

    Args:
        max_tokens: the most tokens of a draft.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._continuations: dict[tuple[int, ...], tuple[int, ...]] = {}
        # The largest possible value, so that drafts are tried at first.
        self._mean_tokens = float(1 + max_tokens)
        self._num_skipped_steps = 0

    def should_draft(self) -> bool:
        """Return whether the next step should have drafts; call it once a step. While drafts do not
        pay, one step in eight has them, to find out whether they pay again.
        """
        self._num_skipped_steps = (
            0
            if self._mean_tokens >= _MIN_MEAN_TOKENS or self._num_skipped_steps == _MAX_SKIPPED_STEPS
            else self._num_skipped_steps + 1
        )
        return self._num_skipped_steps == 0

    def record_gain(self, mean_tokens: float) -> None:
        """Record the mean number of tokens that the replies gained from a step with drafts."""
        self._mean_tokens += (mean_tokens - self._mean_tokens) / _NUM_AVERAGED_STEPS

    def draft(self, history: History) -> Sequence[int]:
        """Return up to `max_tokens` tokens that may come next; none if there is no guess."""
        last_tokens = history.tokens[-_LONG_LENGTHS[0] :]
        for size in _LONG_LENGTHS:
            if (draft := self._continuations.get(tuple(last_tokens[-size:]))) is not None:
                return draft
        return history.repeated_tokens(self.max_tokens) or self._continuations.get(tuple(last_tokens[-_PAIR:]), ())

    def add_reply(self, history: History, start: int) -> None:
        """Store the continuations in a finished reply, which begins at index `start` of its
        history's tokens.
        """
        tokens = history.tokens
        for size in (*_LONG_LENGTHS, _PAIR):
            for index in range(max(start, size), len(tokens)):
                key = tuple(tokens[index - size : index])
                # Inserted again at the end, so that the oldest entries are dropped first.
                self._continuations.pop(key, None)
                self._continuations[key] = tuple(tokens[index : index + self.max_tokens])
        if len(self._continuations) > _MAX_CONTINUATIONS:
            for key in list(islice(self._continuations, _MAX_CONTINUATIONS // 4)):
                del self._continuations[key]
