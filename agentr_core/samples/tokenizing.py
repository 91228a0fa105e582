"""Texts as token ids: those of the chat template, and those that come from outside.

A chat template writes control tokens, which separate the turns of a conversation. In a text from
outside (an observation, a tool's result, a line of a file) the same characters are only characters:
read as tokens they would be turns that nobody took.

A text is tokenised as it stands in the conversation. SentencePiece's tokenizers put a space before
the first word of what they are given, some of them after each control token, too. In the middle of
a conversation there is none, unless the text begins with one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from threading import Lock
from typing import Any, TypeVar

from tokenizers import Regex, Tokenizer, pre_tokenizers

from agentr_core.errors import DataFault

T = TypeVar("T")

_CACHED_SEGMENTS = 8192
_LETTER = "\U00010a00"
"""A letter that hardly any text has. Put before a text, it stands for the conversation: the letters
of a word may follow it, and pre-tokenizers that part words from numbers or signs do so here.
"""
_PROBES = ("a", "Thought: I", "1", "(a)", "'s", " a", "\n\n", "\na")
"""Texts on which a tokenizer shows whether it puts something before the texts that it is given."""


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
    What is encoded follows the token `before`, or begins the conversation if that is None.

    Args:
        template_text: a conversation as the chat template renders it.
    """

    def __init__(self, tokenizer: Any, template_text: str = "") -> None:
        self._added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if str(token)}
        self.special = {number: str(token) for number, token in self._added.items() if token.special}
        control = {
            number: token
            for number, token in self._added.items()
            if token.special or (_separates(str(token)) and str(token) in template_text)
        }
        self.control = tuple(map(str, control.values()))
        # Unknown characters are no turn, whatever their token is called.
        self._ids = frozenset(control) - {tokenizer.unk_token_id}
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._found = _pattern(self.control)
        self._written = re.compile("|".join(map(_written, _longest_first(control.values()))) or r"(?!)")
        self._inside = _Inside(tokenizer)
        self._encoded = lru_cache(_CACHED_SEGMENTS)(self._template)
        self._characters = lru_cache(_CACHED_SEGMENTS)(self._outside)

    def piece(self, text: str, marks: Marks, before: int | None = None) -> tuple[int, ...]:
        """Return the ids of a piece of a rendered conversation: control tokens are read as such
        unless marks cover them.
        """
        if not marks.covers(text):
            return self.template(text, before)
        ids: list[int] = []
        start = 0

        for found in self._written.finditer(text):
            ids += self.outside(marks.uncover(text[start : found.start()]), last_of(ids, before))
            ids += self.template(found[0], last_of(ids, before))
            start = found.end()
        return (*ids, *self.outside(marks.uncover(text[start:]), last_of(ids, before)))

    def template(self, text: str, before: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text in which control tokens are read as such."""
        return self._encoded(text, self._place(before)) if text else ()

    def outside(self, text: str, before: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text in which control tokens are only characters.

        Raises `DataFault` when the tokenizer cannot write them as characters.
        """
        return self._characters(text, self._place(before)) if text else ()

    def text(self, ids: Sequence[int], before: int | None) -> str:
        """Return the text of sampled ids as it goes on from the token `before`, without special
        tokens. Decoded alone, ids that begin with a space may lose it.
        """
        head = self._inside.head if self._goes_on(self._place(before)) else ()
        start, whole = (self._decode(part) if part else "" for part in (head, (*head, *ids)))
        return whole.removeprefix(start)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _place(self, before: int | None) -> int | None:
        """Return where a text stands, as far as that decides its ids: None at the beginning, the
        number of the added token that it follows, or -1 within other text.
        """
        if before in self._added:
            return before if self._inside.matters or self._added[before].rstrip else None
        return -1 if self._inside.matters and before is not None else None

    def _template(self, text: str, place: int | None) -> tuple[int, ...]:
        if place is None:
            return self._encode(text)
        if place < 0:
            return self._inside.encode(text)
        # Some added tokens take the spaces after them; after others a tokenizer adds one.
        token = str(self._added[place])
        ids = self._encode(token + text)
        # Together, the two may be another token.
        return ids[1:] if ids[:1] == (place,) else self._encode(text)

    def _outside(self, text: str, place: int | None) -> tuple[int, ...]:
        if not self._found.search(text):
            return self._template(text, place)
        ids = self._split(text, place)
        if self._ids.isdisjoint(ids):
            return ids
        # The tokenizer still finds control tokens that are not marked as special, but not if they
        # are split.
        first, *others = self._parted(text)
        ids = (*self._split(first, place), *chain.from_iterable(self._split(part, -1) for part in others))
        if not self._ids.isdisjoint(ids):
            strange = next(token for token in ids if token in self._ids)
            raise DataFault(
                f"the tokenizer {self._tokenizer.name_or_path!r} reads a control token (id {strange}) in the text "
                f"{text[:80]!r} and has no other way to write it; use a tokenizer with a plain form of every text"
            )
        return ids

    def _split(self, text: str, place: int | None) -> tuple[int, ...]:
        """Return the ids of a text in which special tokens are only characters."""
        if self._goes_on(place):
            return self._inside.encode(text, split=True)
        return self._encode(text, split_special_tokens=True)

    def _goes_on(self, place: int | None) -> bool:
        """Return whether texts are tokenised otherwise in a place than at the beginning."""
        if place is None or not self._inside.matters:
            return False
        return place < 0 or self.template(_PROBES[0], place) != self._encode(_PROBES[0])

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


class _Inside:
    """The ids of texts in the middle of other text. Thread-safe. `matters` says whether they ever
    differ from those at the beginning, and `head` are the ids of other text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._lock = Lock()
        self._tokenizer = tokenizer
        self._parting: Any = None
        self.matters = False
        self.head: tuple[int, ...] = ()
        # A tokenizer without tokens for line breaks puts a space before each line.
        if not _adds(tokenizer) or not self._plain("\n"):
            return
        if tokenizer.is_fast:
            self._parting = _parting(tokenizer.backend_tokenizer)
        self.head = self._whole(_LETTER, split=False)
        self.matters = any(self.encode(text) != self._plain(text) for text in _PROBES)

    def encode(self, text: str, *, split: bool = False) -> tuple[int, ...]:
        """Return the ids of a text. With `split`, special tokens in it are only characters."""
        return self._whole(_LETTER + text, split=split)[len(self.head) :]

    def _whole(self, text: str, *, split: bool) -> tuple[int, ...]:
        with self._lock:
            if self._parting is None:
                options = {"split_special_tokens": True} if split else {}
                return tuple(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])
            self._parting.encode_special_tokens = split
            return tuple(self._parting.encode(text, add_special_tokens=False).ids)

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def last_of(ids: Sequence[int], before: int | None = None) -> int | None:
    """Return the last of some token ids; if there are none, the token before them."""
    return ids[-1] if ids else before


def _adds(tokenizer: Any) -> bool:
    """Return whether a tokenizer may put a space before the texts that it is given, by its parts:
    most do not, and need no copy.
    """
    if not getattr(tokenizer, "is_fast", False):
        return hasattr(tokenizer, "sp_model")
    backend = tokenizer.backend_tokenizer
    parts = f"{backend.normalizer} {backend.pre_tokenizer}"
    return any(name in parts for name in ("Prepend", "Metaspace", "add_prefix_space=True"))


def _parting(backend: Any) -> Any:
    """Return a copy of a tokenizer that parts `_LETTER` from what is beside it, so that the tokens
    of a text do not depend on it.
    """
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(_LETTER)[0][0]
    letter = pre_tokenizers.Split(Regex(f"{_LETTER}|{re.escape(as_bytes)}"), "isolated")
    copy.pre_tokenizer = pre_tokenizers.Sequence([*([copy.pre_tokenizer] if copy.pre_tokenizer else []), letter])
    return copy


def _separates(token: str) -> bool:
    """Return whether an added token can be one that separates turns: not white space, a word or a
    single sign, which tokenizers add for the sake of shorter texts.
    """
    return len(token) > 1 and not re.fullmatch(r"[\w\s▁]*", token)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _longest_first(texts))) or r"(?!)")


def _written(token: Any) -> str:
    """Return the pattern of a token in a text: some tokens include the space beside them."""
    before, after = (r"\s*" if takes_space else "" for takes_space in (token.lstrip, token.rstrip))
    return before + re.escape(str(token)) + after


def _longest_first(texts: Iterable[T]) -> list[T]:
    return sorted(texts, key=lambda text: (-len(str(text)), str(text)))
