r"""Comparison of two answers by their value, with a computer algebra system.

An answer is written by a model, so none of it is executed: our own parser reads numbers, letters,
`+ - * / ^`, brackets, fractions, roots and pi, and gives up on anything else. Length and powers are
bounded, so that no answer takes long. A formula with letters is read once at each of several
points, where its letters are numbers: the bound on powers then holds for them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

_MOST_CHARACTERS = 200
_MOST_BITS = 20_000
"""The most bits of a power of a rational number."""
_MOST_EXPONENT = 64
_MOST_ELEMENTS = 8
_DIGITS = 40
_ROOT_DIGITS = 100
_PLACES = 3
_CLOSE = sympy.Float(10) ** -25
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>\\[A-Za-z]+|sqrt|pi|[A-Za-z])|(?P<sign>\*\*|\\[{}]|[-+*/^(){}\[\],]))"
)
_TIMES = ("*", r"\cdot", r"\times")
_OVER = ("/", r"\div")
_PROPER = [r"\frac", "{", "}", "{", "}"]
"""The tokens of a fraction around its two numbers."""
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}"}


class _Unknown(Exception):
    """An answer that is not a formula, or is too large."""


def same_value(one: str, other: str) -> bool:
    """Return whether two answers, in normal form, are one number, formula, tuple or set.

    The result is False if one of them cannot be read. Formulas with letters are compared at several
    points, to 40 digits.
    """
    try:
        return _same(_read(one), _read(other))
    except (_Unknown, ZeroDivisionError, RecursionError, ValueError, TypeError):
        return False


def _same(one: tuple[str, list[list[str]]], other: tuple[str, list[list[str]]]) -> bool:
    (brackets, parts), (others_brackets, others_parts) = one, other
    if brackets != others_brackets or len(parts) != len(others_parts):
        return False
    places = _places(sorted({token for part in (*parts, *others_parts) for token in part if _is_letter(token)}))
    values, others = ([[_value(part, place) for place in places] for part in each] for each in (parts, others_parts))
    if not brackets.startswith("\\"):
        return all(map(_equal, values, others))
    left = list(others)
    for value in values:
        match = next((place for place, known in enumerate(left) if _equal(value, known)), None)
        if match is None:
            return False
        del left[match]
    return True


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two formulas have the same value at each place."""
    return all(map(_close, one, other))


def _places(letters: Sequence[str]) -> list[dict[str, Any]]:
    """Return values for letters: formulas that agree at all of these points count as equal."""
    if not letters:
        return [{}]
    return [
        {letter: sympy.Rational(97 + 31 * i + 17 * place, 53 + 7 * i) for i, letter in enumerate(letters)}
        for place in range(_PLACES)
    ]


def _close(one: Any, other: Any) -> bool:
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    first, second = sympy.N(one, _DIGITS), sympy.N(other, _DIGITS)
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return False
    return bool(abs(first - second) <= _CLOSE * max(sympy.Integer(1), abs(first)))


def _read(text: str) -> tuple[str, list[list[str]]]:
    """Return the brackets around the values of an answer, and the tokens of each value; a single
    value has no brackets.
    """
    if not text or len(text) > _MOST_CHARACTERS:
        raise _Unknown
    tokens = list(_tokens(text))
    for opening, closing in _CLOSING.items():
        if tokens[0] == opening and tokens[-1] == closing:
            parts = _split(tokens[1:-1])
            if parts is not None and (len(parts) > 1 or opening.startswith("\\")):
                return opening + closing, parts
    # Half-open intervals keep their own brackets.
    if tokens[0] in "([" and tokens[-1] in ")]" and tokens[-1] != _CLOSING[tokens[0]]:
        parts = _split(tokens[1:-1])
        if parts is not None and len(parts) == 2:
            return tokens[0] + tokens[-1], parts
    parts = _split(tokens)
    if parts is None:
        raise _Unknown
    return ("," if len(parts) > 1 else ""), parts


def _split(tokens: Sequence[str]) -> list[list[str]] | None:
    """Return the tokens between commas outside brackets, or None if brackets do not match."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if depth < 0:
            return None
        if token == "," and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts if not depth and len(parts) <= _MOST_ELEMENTS else None


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise _Unknown
        position = found.end()
        yield found[0].strip()


def _value(tokens: Sequence[str], letters: Mapping[str, Any]) -> Any:
    """Return the value of a formula, given those of its letters."""
    if _is_word(tokens):
        raise _Unknown
    parser = _Parser(tokens, letters)
    value = parser.sum()
    parser.end()
    return value


def _is_word(tokens: Sequence[str]) -> bool:
    """Return whether tokens are a word, a code or an order of choices, such as `cat`, `1A` or
    `BDCA`, and not a product such as `ab` or `2xyz`: its letters do not commute.
    """
    plain = len(tokens) > 1 and all(token.isalnum() and token not in ("sqrt", "pi") for token in tokens)
    return plain and (any(token.isupper() for token in tokens) or (len(tokens) > 2 and tokens[0].isalpha()))


def _is_letter(token: str) -> bool:
    return len(token) == 1 and token.isalpha()


class _Parser:
    """A recursive-descent parser of one formula whose letters have values."""

    def __init__(self, tokens: Sequence[str], letters: Mapping[str, Any]) -> None:
        self._tokens = tokens
        self._letters = letters
        self._position = 0

    def sum(self) -> Any:
        total = self._product()
        while self._next in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            total += sign * self._product()
        return total

    def end(self) -> None:
        if self._next:
            raise _Unknown

    def _product(self) -> Any:
        total = self._signed()
        while self._next not in ("", "+", "-", ")", "]", "}", r"\}", ","):
            if self._next in _TIMES:
                self._take()
                total *= self._signed()
            elif self._next in _OVER:
                self._take()
                total /= self._signed()
            else:
                total *= self._power()
        return total

    def _signed(self) -> Any:
        if self._next in ("+", "-"):
            return self._signed() if self._take() == "+" else -self._signed()
        return self._power()

    def _power(self) -> Any:
        base = self._atom()
        if self._next not in ("^", "**"):
            return base
        self._take()
        return _raised(base, self._signed())

    def _atom(self) -> Any:
        token = self._take()
        if token[0].isdigit():
            number = sympy.Rational(token)
            return number + self._atom() if self._is_mixed() else number
        if token in ("(", "[", "{"):
            return self._until(_CLOSING.get(token, "}"))
        if token == r"\frac":
            over = self._group()
            return over / self._group()
        if token in (r"\sqrt", "sqrt"):
            degree = self._until("]") if self._next == "[" and self._take() else sympy.Integer(2)
            return _raised(self._group(), 1 / degree)
        if token in (r"\pi", "pi"):
            return sympy.pi
        if token in self._letters:
            return self._letters[token]
        raise _Unknown

    def _group(self) -> Any:
        opening = self._take()
        if opening not in ("{", "("):
            raise _Unknown
        return self._until("}" if opening == "{" else ")")

    def _is_mixed(self) -> bool:
        """Return whether the number just taken begins a mixed one, such as 3\\frac{1}{2}."""
        *before, number = self._tokens[max(0, self._position - 2) : self._position]
        ahead = self._tokens[self._position : self._position + 7]
        if not number.isdigit() or before in (["^"], ["**"]) or [*ahead[:2], *ahead[3:5], *ahead[6:]] != _PROPER:
            return False
        return ahead[2].isdigit() and ahead[5].isdigit() and int(ahead[2]) < int(ahead[5])

    def _until(self, closing: str) -> Any:
        value = self.sum()
        if self._take() != closing:
            raise _Unknown
        return value

    @property
    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next
        if not token:
            raise _Unknown
        self._position += 1
        return token


def _raised(base: Any, exponent: Any) -> Any:
    """Return a power: exact for whole powers of rational numbers, else to 100 digits. Raises
    `_Unknown` if it is too large to write out.
    """
    if not base.is_finite or not abs(sympy.N(exponent)) <= _MOST_EXPONENT:
        raise _Unknown
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > _MOST_BITS:
            raise _Unknown
        if exponent.is_Integer:
            return base**exponent
    # Written out exactly, a root of a number of many digits would be factorised, which may not end.
    return sympy.N(sympy.Pow(base, exponent, evaluate=False), _ROOT_DIGITS)
