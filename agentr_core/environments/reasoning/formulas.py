r"""The values of a formula that a model wrote, as numbers at a few points.

None of it is executed: our own parser reads numbers, letters, `+ - * / ^`, brackets, fractions,
roots, logarithms, functions of angles, absolute values and factorials, and gives up on anything
else. Values are rational numbers where they can be, else complex ones of 80 digits. Length, powers
and the size of numbers are bounded, so that no answer takes long. Letters have a value at each
point; the bounds then hold for them, too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import comb, factorial, isqrt
from typing import Any
from zlib import crc32

import mpmath

from agentr_core.environments.reasoning.notation import GREEK

MOST_CHARACTERS = 400
PLACES = 6
_MOST_BITS = 20_000
"""The most bits of a rational number."""
_MOST_EXPONENT = 100_000
"""The most binary digits before or after the point of any other number."""
_MOST_FACTORIAL = 1000
_DIGITS = 80
_CLOSE = 1e-50
_NEGLIGIBLE = 1e-50
_PRINTED_DIGITS = 15
_PRINTED_CLOSE = 1e-13
_PRINTED_ZERO = 1e-14

_FUNCTIONS = (
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "sinh",
    "cosh",
    "tanh",
    "ln",
    "log",
    "lg",
    "exp",
    "sqrt",
    "cbrt",
)
_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "asin": "asin", "acos": "acos", "atan": "atan"}
_NAMES = frozenset((*_FUNCTIONS, *_INVERSE, "abs", "floor", "ceil", "pi", "binom", "frac"))
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![eE]?\.?\d))|(?P<command>\\[A-Za-z]+|\\[{}])"
    r"|(?P<letters>[A-Za-z]+)|(?P<sign>\*\*|\.\.\.|[-+*/^_(){}\[\],|!<>=:&%']))"
)
_DATE = re.compile(r"\d{1,2}/\d{1,2}/\d{4}|\d{4}([-/])\d{1,2}\1\d{1,2}")
_TIMES = ("*", r"\times")
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
_ENDS = frozenset({"", "+", "-", ")", "]", "}", r"\}", ",", r"\rfloor", r"\rceil", "&", r"\pm", r"\mp"})
_PROPER = (r"\frac", "{", "}", "{", "}")
"""The tokens of a fraction around its two numbers."""
_LETTERS = frozenset(rf"\{form}" for name in GREEK.split() for form in (name, name.title()) if name != "pi") | {r"\ell"}
"""Commands that are letters."""
_WHOLE = frozenset("jklmnpq")
"""Letters that usually stand for whole numbers."""
_WHOLES = (5, 3, 8, -4, 11, 6)

Value = Any
"""A `Fraction`, or a number of mpmath."""


class Unreadable(Exception):
    """A text that is not a formula, or is too large."""


class _Undefined(Exception):
    """A formula that has no value at a point."""


def tokens(text: str) -> list[str]:
    """Return the tokens of a formula; several letters side by side are one token. Numbers and
    letters keep a space before them: 1 2 is not 12, and 5 cm is not 5cm.

    Raises `Unreadable` for a text with other signs, or one that is too long.
    """
    if len(text) > MOST_CHARACTERS:
        raise Unreadable
    found: list[str] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise Unreadable
        position = token.end()
        spaced = found and token[0][0].isspace() and (token["number"] or token["letters"])
        found.append(f" {token[0].strip()}" if spaced else token[0].strip())
    return found


def is_printed(parts: Sequence[str]) -> bool:
    """Return whether a formula has a number with the digits that a computer's numbers have when
    they are printed; its last digits may be wrong.
    """
    return any(
        ("." in token or "e" in token.lower())
        and token[0] in "0123456789."
        and len(re.sub(r"[eE].*|\.", "", token).lstrip("0")) >= _PRINTED_DIGITS
        for token in map(str.strip, parts)
    )


def values(parts: Sequence[str]) -> list[Value | None]:
    """Return the value of a formula at each point, None where it has none. Raises `Unreadable`."""
    single = _single([token.strip() for token in parts])
    if _DATE.fullmatch("".join(single)):
        raise Unreadable
    constant = not any(_is_variable(token) for token in single)
    found: list[Value | None] = []
    for place in range(1 if constant else PLACES):
        try:
            found.append(_Parser(single, place).whole())
        except (_Undefined, ZeroDivisionError):
            found.append(None)
        except (OverflowError, ValueError, TypeError, RecursionError, mpmath.libmp.NoConvergence) as error:
            raise Unreadable from error
    return found * (PLACES if constant else 1)


def equal(one: Sequence[Value | None], other: Sequence[Value | None], *, printed: bool) -> bool:
    """Return whether two formulas have the same values, up to the last digits of a printed number;
    at most of the points both must have one.
    """
    pairs = zip(one, other, strict=True)
    defined = [(first, second) for first, second in pairs if first is not None and second is not None]
    if 2 * len(defined) <= len(one):
        return False
    return all(close(first, second, printed=printed) for first, second in defined)


def close(one: Value, other: Value, *, printed: bool = False) -> bool:
    """Return whether two numbers are the same: rational ones exactly, others to 50 digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction) and not printed:
        return one == other
    first, second = _real(one), _real(other)
    apart, size = abs(first - second), max(abs(first), abs(second))
    if printed and 0 in (one, other):
        return bool(apart <= _PRINTED_ZERO)
    return bool(apart <= size * (_PRINTED_CLOSE if printed else _CLOSE) or apart <= _NEGLIGIBLE)


def ratio(one: Sequence[Value | None], other: Sequence[Value | None]) -> Value | None:
    """Return the number by which a formula differs from another as a factor, if there is one."""
    factors = [
        _quotient(first, second)
        for first, second in zip(one, other, strict=True)
        if first is not None and second is not None and not close(second, Fraction(0))
    ]
    same = len(factors) > PLACES // 2 and all(close(factors[0], factor) for factor in factors)
    return factors[0] if same and not close(factors[0], Fraction(0)) else None


def difference(one: Sequence[Value | None], other: Sequence[Value | None]) -> list[Value | None]:
    """Return the difference of the values of two formulas."""
    pairs = zip(one, other, strict=True)
    return [
        None if first is None or second is None else _sum(first, _times(Fraction(-1), second))
        for first, second in pairs
    ]


_OF_THREAD = threading.local()


def _context() -> Any:
    # The precision of mpmath's own context belongs to all threads.
    if not hasattr(_OF_THREAD, "context"):
        _OF_THREAD.context = mpmath.MPContext()
        _OF_THREAD.context.dps = _DIGITS
    return _OF_THREAD.context


def _real(value: Value) -> Any:
    if not isinstance(value, Fraction):
        return value
    return _context().mpf(value.numerator) / value.denominator


def _checked(value: Value) -> Value:
    """Return a value that is neither too large nor none. Raises `Unreadable` or `_Undefined`."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
            raise Unreadable
        return value
    context = _context()
    if context.isnan(value) or context.isinf(value):
        raise _Undefined
    if value and abs(context.mag(value)) > _MOST_EXPONENT:
        raise Unreadable
    return value


def _sum(one: Value, other: Value) -> Value:
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _checked(one + other if exact else _real(one) + _real(other))


def _times(one: Value, other: Value) -> Value:
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _checked(one * other if exact else _real(one) * _real(other))


def _quotient(one: Value, other: Value) -> Value:
    if other == 0:
        raise _Undefined
    exact = isinstance(one, Fraction) and isinstance(other, Fraction)
    return _checked(one / other if exact else _real(one) / _real(other))


def _power(base: Value, exponent: Value) -> Value:
    """Return a power: exact for whole powers of rational numbers and for roots that are rational.

    Raises `Unreadable` if it is too large, `_Undefined` for 0 to a negative power.
    """
    if base == 0:
        if exponent != abs(exponent) if not _is_complex(exponent) else True:
            raise _Undefined
        return Fraction(0 if exponent else 1)
    size = abs(_real(exponent)) * max(1, abs(_context().mag(_real(base))))
    if size > _MOST_EXPONENT:
        raise Unreadable
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1:
            if bits * abs(exponent) > _MOST_BITS:
                raise Unreadable
            return base**exponent.numerator
        if base > 0 and (root := _exact_root(base, exponent.denominator)) is not None:
            return _power(root, Fraction(exponent.numerator))
    return _checked(_context().power(_real(base), _real(exponent)))


def _root(value: Value, degree: Value) -> Value:
    odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2
    if odd and not _is_complex(value) and value < 0:
        return _times(Fraction(-1), _root(-value, degree))
    return _power(value, _quotient(Fraction(1), degree))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    parts = [_whole_root(part, degree) for part in (value.numerator, value.denominator)]
    return None if None in parts else Fraction(*parts)  # type: ignore[arg-type]


def _whole_root(number: int, degree: int) -> int | None:
    if degree == 2:
        root = isqrt(number)
    elif number.bit_length() <= 3 * _DIGITS:
        root = int(_context().nint(_context().root(number, degree)))
    else:
        return None
    return root if root**degree == number else None


def _is_complex(value: Value) -> bool:
    return not isinstance(value, Fraction) and bool(_context().im(value))


def _applied(name: str, value: Value, base: Value | None = None) -> Value:
    """Return a function of a number. Raises `Unreadable`, `_Undefined`."""
    context = _context()
    if name in ("sqrt", "cbrt"):
        return _root(value, Fraction(3 if name == "cbrt" else 2))
    if name in ("abs", "floor", "ceil"):
        if not isinstance(value, Fraction):
            if name != "abs" and value and context.mag(value) > _DIGITS:
                raise Unreadable
            return _checked(getattr(context, {"abs": "fabs"}.get(name, name))(value))
        return abs(value) if name == "abs" else Fraction(value // 1 if name == "floor" else -(-value // 1))
    number = _real(value)
    if name in ("ln", "log", "lg"):
        if number == 0:
            raise _Undefined
        low = base if base is not None else Fraction(10) if name == "lg" else None
        return _checked(context.ln(number) if low is None else context.ln(number) / context.ln(_real(low)))
    if name in ("exp", "sinh", "cosh", "tanh") and abs(number) > _MOST_EXPONENT // 2:
        raise Unreadable
    if number and context.mag(number) > 2 * _DIGITS:
        raise Unreadable
    return _checked(getattr(context, _INVERSE.get(name, name))(number))


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise _Undefined
    if value > _MOST_FACTORIAL:
        raise Unreadable
    return Fraction(factorial(int(value)))


def _binomial(top: Value, bottom: Value) -> Value:
    if not all(isinstance(each, Fraction) and each.denominator == 1 and each >= 0 for each in (top, bottom)):
        raise _Undefined
    if top > _MOST_FACTORIAL:
        raise Unreadable
    return Fraction(comb(int(top), int(bottom)))


def _single(parts: Sequence[str]) -> list[str]:
    """Return tokens with letters one by one, and a letter and what is below it as one. Raises
    `Unreadable` for a word.
    """
    if _is_word(parts):
        raise Unreadable
    found: list[str] = []
    for token in parts:
        found += [token] if token in _NAMES or not token.isalpha() else list(token)
    joined: list[str] = []
    position = 0
    while position < len(found):
        token = found[position]
        position += 1
        if position < len(found) and found[position] == "_" and _is_variable(token):
            below, position = _below(found, position + 1)
            token = f"{token}_{below}"
        joined.append(token)
    return joined


def _below(found: Sequence[str], position: int) -> tuple[str, int]:
    """Return what stands below a letter, and the position after it."""
    if position >= len(found):
        raise Unreadable
    if found[position] != "{":
        return found[position], position + 1
    depth = 0
    for end in range(position, len(found)):
        depth += (found[end] == "{") - (found[end] == "}")
        if not depth:
            return "".join(found[position + 1 : end]), end + 1
    raise Unreadable


def _is_variable(token: str) -> bool:
    if token.startswith("\\"):
        return token in _LETTERS or token.partition("_")[0] in _LETTERS
    return token[0].isalpha() and token not in _NAMES and token not in ("e", "i")


def _is_word(parts: Sequence[str]) -> bool:
    """Return whether tokens are a word, a code or an order of choices, such as `cat`, `1A` or
    `BDCA`, and not a product such as `ab` or `2xyz`: its letters do not commute.
    """
    names = [token for token in parts if token.isalpha() and token not in _NAMES]
    if any(len(name) > 4 or (len(name) > 1 and not (name.islower() or name.isupper())) for name in names):
        return True
    letters = "".join(parts)
    if not names or len(letters) < 2 or not all(token.isalnum() and token not in _NAMES for token in parts):
        return False
    return any(map(str.isupper, names)) or (len(letters) > 2 and letters[0].isalpha())


@cache
def _at(letter: str, place: int) -> Fraction:
    """Return the value of a letter at a point: a number of its own, of either sign."""
    code = crc32(letter.encode())
    if letter in _WHOLE:
        return Fraction(_WHOLES[(place + ord(letter)) % len(_WHOLES)])
    size = Fraction(97 + 31 * (code % 23) + 17 * place, 53 + 7 * (code % 29))
    sign = (1, -1)[place] if place < 2 else (-1) ** (code >> place & 1)
    return sign * size


class _Parser:
    """A recursive-descent parser of one formula at one point."""

    def __init__(self, parts: Sequence[str], place: int) -> None:
        self._tokens = list(parts)
        self._place = place
        self._position = 0
        self._bars = 0

    def whole(self) -> Value:
        value = self._sum()
        if self._next:
            raise Unreadable
        return value

    def _sum(self) -> Value:
        total = self._product()
        while self._next in ("+", "-"):
            sign = Fraction(1 if self._take() == "+" else -1)
            total = _sum(total, _times(sign, self._product()))
        return total

    def _product(self, *, within: bool = False) -> Value:
        """Return a product; `within` a function without brackets, it ends before the next one."""
        total = self._signed()
        while self._next not in _ENDS and not (self._next == "|" and self._bars):
            if within and (self._next in _TIMES or self._next == "/" or _function(self._next)):
                break
            if self._next in _TIMES:
                self._take()
                total = _times(total, self._signed())
            elif self._next in ("/", r"\over"):
                self._take()
                total = _quotient(total, self._signed())
            elif self._next[0] in "0123456789.":
                # Two numbers side by side are not their product.
                raise Unreadable
            else:
                total = _times(total, self._raised())
        return total

    def _signed(self) -> Value:
        sign = Fraction(1)
        while self._next in ("+", "-"):
            sign *= 1 if self._take() == "+" else -1
        return _times(sign, self._raised())

    def _raised(self) -> Value:
        base = self._atom()
        while self._next in ("!", r"\deg"):
            base = _factorial(base) if self._take() == "!" else _times(base, self._context_pi() / 180)
        if self._next not in ("^", "**"):
            return base
        self._take()
        value = _power(base, self._signed())
        while self._next == "!":
            self._take()
            value = _factorial(value)
        return value

    def _atom(self) -> Value:
        token = self._take()
        name = token.removeprefix("\\")
        if token[0] in "0123456789.":
            return self._number(token)
        if token in ("(", "[", "{"):
            return self._until(_CLOSING[token])
        if token == "|":
            self._bars += 1
            value = self._sum()
            self._bars -= 1
            self._expect("|")
            return _applied("abs", value)
        if token in (r"\lfloor", r"\lceil"):
            return _applied("floor" if token == r"\lfloor" else "ceil", self._until(token.replace("\\l", "\\r")))
        if token in (r"\frac", r"\binom"):
            top = self._argument()
            bottom = self._argument()
            return _quotient(top, bottom) if token == r"\frac" else _binomial(top, bottom)
        if token == r"\sqrt":
            degree = self._until("]") if self._next == "[" and self._take() else Fraction(2)
            return _root(self._argument(), degree)
        if name == "pi":
            return self._context_pi()
        if _function(token):
            return self._of_function(name)
        if token == "e":
            return _context().e
        if token == "i":
            return _context().mpc(0, 1)
        if _is_variable(token):
            return _at(token, self._place)
        raise Unreadable

    def _number(self, token: str) -> Value:
        _, _, exponent = token.lower().partition("e")
        if exponent and abs(int(exponent)) > _MOST_FACTORIAL:
            raise Unreadable
        if len(token) > 1 and token.isdigit() and token[0] == "0" and len(self._tokens) > 2:
            # 2024-01-05 is a date.
            raise Unreadable
        number = _checked(Fraction(token.rstrip(".")))
        return _sum(number, self._atom()) if self._is_mixed(token) else number

    def _of_function(self, name: str) -> Value:
        base = power = None
        if self._next == "_":
            self._take()
            base = self._argument()
        if self._next in ("^", "**"):
            self._take()
            power = self._argument()
        bracket = self._next in ("(", "{", "[")
        value = self._atom() if bracket else self._product(within=True)
        if power == -1 and f"arc{name}" in _INVERSE:
            return _applied(f"arc{name}", value)
        value = _applied(name, value, base)
        return value if power is None else _power(value, power)

    def _argument(self) -> Value:
        """Return the value of what a command is applied to: a group, or else one digit or sign."""
        token = self._next
        if len(token) > 1 and token[0].isdigit():
            self._tokens[self._position : self._position + 1] = [token[0], token[1:]]
        if token == "-":
            self._take()
            return _times(Fraction(-1), self._argument())
        return self._atom()

    def _is_mixed(self, number: str) -> bool:
        r"""Return whether the number just taken begins a mixed one, such as 3\frac{1}{2}."""
        before = self._tokens[self._position - 2 : self._position - 1]
        ahead = self._tokens[self._position : self._position + 7]
        if not number.isdigit() or before in (["^"], ["**"]) or (*ahead[:2], *ahead[3:5], *ahead[6:]) != _PROPER:
            return False
        return ahead[2].isdigit() and ahead[5].isdigit() and int(ahead[2]) < int(ahead[5])

    def _until(self, closing: str) -> Value:
        bars, self._bars = self._bars, 0
        value = self._sum()
        self._bars = bars
        self._expect(closing)
        return value

    def _context_pi(self) -> Value:
        return +_context().pi

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise Unreadable

    @property
    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next
        if not token:
            raise Unreadable
        self._position += 1
        return token


def _function(token: str) -> bool:
    name = token.removeprefix("\\")
    return name in _FUNCTIONS or name in _INVERSE or name in ("abs", "floor", "ceil")
