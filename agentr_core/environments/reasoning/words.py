"""The words of an answer in a normal form, by which answers of knowledge are compared.

Signs without a meaning of their own are no part of a word; those that make it another word are: the
point of 3.5, the minus of -5, the colon of 10:30, the marks of C#, C++ and A*.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from string import punctuation

_ARTICLES = frozenset({"a", "an", "the"})
_LATIN = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE"}
    | {"\N{LATIN SMALL LETTER DOTLESS I}": "i"}
)
_PLAIN = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-")
    | dict.fromkeys("\u2019\u2018\u02bc\u2032`", "'")
    | {"\N{EM DASH}": " - ", "\N{FRACTION SLASH}": "/", "♯": "#", "♭": "b"}
)
_SUPERSCRIPT = re.compile("(?<=\\d)[⁰¹²³⁴-⁹]+")
_VULGAR = re.compile("(?<=\\d)(?=[¼-¾⅐-⅞])")
_ACCENT = re.compile("(?<=[A-Za-z])[\u0300-\u036f]+")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3}|_{1,3})(\S(?:[^*_\n]*\S)?)\1(?!\w)")
_INITIALS = re.compile(r"\b[^\W\d_]\.(?:\s?[^\W\d_]\.)+")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_NAMED = (
    (re.compile(r"%|\bper cent\b"), " percent "),
    (re.compile(r"°"), " degrees "),
    (re.compile(r"\$\s*(?=\.?\d)|(?<=\d)\s*\$"), " dollars "),
    (re.compile(r"€\s*(?=\.?\d)|(?<=\d)\s*€"), " euros "),
    (re.compile(r"£\s*(?=\.?\d)|(?<=\d)\s*£"), " pounds "),
    (re.compile(r"\s&\s"), " and "),
    (re.compile(r"[®™©]"), ""),
    (re.compile(r"(?<![\w.])\.(?=\d)"), "0."),
    (re.compile(r"(?<!\S)\+(?=\d)"), ""),
)
_MEANT = (
    r"(?<=\d)[.:/'-](?=\d)"  # 3.5, 10:30, 1/2, 2-1
    r"|(?<![\w)\].])-(?=\d)"  # -5
    r"|(?<=[^\W\d_])\#(?!\w)"  # C#
    r"|(?<=\w)\*(?![\w*])"  # A*
    r"|(?:(?<=\b[A-Z])|(?<=\bAB))-(?![\w-])"  # the grade A-, the blood group AB-
)
_SIGN = re.compile(rf"(?P<meant>{_MEANT})|(?P<dropped>'|\.(?!\d))|[^\w\s]|_")


def published_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation, the signs of ASCII and
    articles. A text that has nothing else, such as the choice `A`, keeps them.

    Source: SQuAD (arXiv 1606.05250), and the published code of ET-Agent.
    """
    plain = unicodedata.normalize("NFKC", text).lower()
    bare = "".join(sign for sign in plain if sign not in punctuation and unicodedata.category(sign)[0] != "P")
    found = bare.split() or plain.split()
    return [word for word in found if word not in _ARTICLES] or found


def words(text: str) -> list[list[str]]:
    """Return the words of a text: once with what a hyphen joins as several words, once as one word.

    Words are without case, without the accents of Latin letters, without articles, except at the
    end (hepatitis A), and without signs that mean nothing. A text that has nothing else keeps them.
    """
    plain = _plain(text)
    found = [_without_signs(plain, between).casefold().split() or text.casefold().split() for between in (" ", "")]
    return [_without_articles(each) for each in found]


def _plain(text: str) -> str:
    """Return a text with one character for each meaning, and names for signs that have one."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{found[0]}", _VULGAR.sub(" ", text)).translate(_PLAIN)
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text)).translate(_PLAIN)
    text = unicodedata.normalize("NFC", _ACCENT.sub("", text)).translate(_LATIN)
    text = _EMPHASIS.sub(r"\2", text)
    text = _INITIALS.sub(lambda found: re.sub(r"[.\s]", "", found[0]) + " ", text)
    text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    for sign, name in _NAMED:
        text = sign.sub(name, text)
    return text


def _without_signs(text: str, between: str) -> str:
    """Return a text without punctuation that means nothing; `between` stands for that which joins
    words. Digits are never joined: 1,2 is not 12.
    """

    def sign(found: re.Match[str]) -> str:
        if found["meant"] or not unicodedata.category(found[0]).startswith("P"):
            return found[0]
        if found["dropped"]:
            return ""
        start, end = found.span()
        digits = text[start - 1 : start].isdigit() and text[end : end + 1].isdigit()
        return " " if digits else between

    return _SIGN.sub(sign, text)


def _without_articles(found: Sequence[str]) -> list[str]:
    if all(word in _ARTICLES for word in found):
        return list(found)
    return [word for place, word in enumerate(found) if word not in _ARTICLES or place == len(found) - 1]
