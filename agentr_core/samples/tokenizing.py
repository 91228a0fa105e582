"""Texts as token ids: those of the chat template, and those that come from outside.

A chat template writes control tokens, which separate the turns of a conversation. In a text from
outside (an observation, a tool's result, a line of a file) the same characters are only characters:
read as tokens they would be turns that nobody took.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from threading import Lock
from typing import Any, TypeVar

from agentr_core.errors import DataFault

T = TypeVar("T")

_CACHED_SEGMENTS = 8192


class Marks:
    """Stand-ins for what a template must not read: assistant turns, and control tokens in texts
    from outside.

    Args:
        texts: all texts of a conversation; no mark occurs in any of them.
        control: the texts of the control tokens.
    """

    def __init__(self, texts: Sequence[str], control: Sequence[str]) -> None:
        salt = 0
        while any(f"@@{salt}-" in text for text in texts):
            salt += 1
        self._sign = f"@@{salt}-"
        self._covers = {text: f"{self._sign}control-{number}@@" for number, text in enumerate(control)}
        self._texts = {cover: text for text, cover in self._covers.items()}
        self._control = _pattern(control)
        self._cover = _pattern(self._texts)

    def turn(self, number: int) -> str:
        """Return the mark that stands for an assistant turn."""
        return f"{self._sign}assistant-turn-{number}@@"

    def cover(self, text: str) -> str:
        """Return a text from outside with marks in place of control tokens."""
        return self._control.sub(lambda found: self._covers[found[0]], text)

    def uncover(self, text: str) -> str:
        """Return a text with its control tokens in place of their marks."""
        return self._cover.sub(lambda found: self._texts[found[0]], text)

    def covers(self, text: str) -> bool:
        """Return whether a text has marks of control tokens."""
        return self._sign in text and self._cover.search(text) is not None


class Encoder:
    """An encoder of texts as token ids, with one tokenizer. Thread-safe.

    `special` are the texts of its special tokens, by id, and `control` the texts that are control
    tokens in a conversation: the special ones, and those that separate turns in `template_text`.

    Args:
        template_text: a conversation as the chat template renders it.
    """

    def __init__(self, tokenizer: Any, template_text: str = "") -> None:
        added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if str(token)}
        self.special = {number: str(token) for number, token in added.items() if token.special}
        control = {number: token for number, token in added.items() if token.special or str(token) in template_text}
        self.control = tuple(map(str, control.values()))
        self._ids = frozenset(control)
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._found = _pattern(self.control)
        self._written = re.compile("|".join(map(_written, _longest_first(control.values()))) or r"(?!)")
        self.template = lru_cache(_CACHED_SEGMENTS)(self._template)
        self.outside = lru_cache(_CACHED_SEGMENTS)(self._outside)

    def piece(self, text: str, marks: Marks) -> tuple[int, ...]:
        """Return the ids of a piece of a rendered conversation: control tokens are read as such
        unless marks cover them.
        """
        if not marks.covers(text):
            return self.template(text)
        ids: list[int] = []
        start = 0
        for found in self._written.finditer(text):
            ids += (*self.outside(marks.uncover(text[start : found.start()])), *self.template(found[0]))
            start = found.end()
        return (*ids, *self.outside(marks.uncover(text[start:])))

    def _template(self, text: str) -> tuple[int, ...]:
        return self._encode(text) if text else ()

    def _outside(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text in which control tokens are only characters.

        Raises `DataFault` when the tokenizer cannot write them as characters.
        """
        if not self._found.search(text):
            return self._template(text)
        ids = self._encode(text, split_special_tokens=True)
        if self._ids.isdisjoint(ids):
            return ids
        # The tokenizer still finds control tokens that are not marked as special, but not if they
        # are split.
        ids = tuple(chain.from_iterable(self._encode(part, split_special_tokens=True) for part in self._parted(text)))
        if not self._ids.isdisjoint(ids):
            strange = next(token for token in ids if token in self._ids)
            raise DataFault(
                f"the tokenizer {self._tokenizer.name_or_path!r} reads a control token (id {strange}) in the text "
                f"{text[:80]!r} and has no other way to write it; use a tokenizer with a plain form of every text"
            )
        return ids

    def _parted(self, text: str) -> list[str]:
        """Return a text in parts without control tokens: each token is cut after its first
        character.
        """
        found = self._found.search(text)
        if found is None or len(found[0]) < 2:
            return [text] if text else []
        cut = found.start() + 1
        return [text[:cut], *self._parted(text[cut:])]

    def _encode(self, text: str, **options: bool) -> tuple[int, ...]:
        # A fast tokenizer refuses to be used by two threads at once while its padding settings
        # change.
        with self._lock:
            return tuple(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _longest_first(texts))) or r"(?!)")


def _written(token: Any) -> str:
    """Return the pattern of a token in a text: some tokens include the space beside them."""
    before, after = (r"\s*" if takes_space else "" for takes_space in (token.lstrip, token.rstrip))
    return before + re.escape(str(token)) + after


def _longest_first(texts: Iterable[T]) -> list[T]:
    return sorted(texts, key=lambda text: (-len(str(text)), str(text)))
