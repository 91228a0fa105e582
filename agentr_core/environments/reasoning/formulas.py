"""The values of a formula that a model wrote, as numbers at a few points.

Nothing is executed as code: our own parser reads numbers, letters, `+ - * / ^`, brackets,
fractions, roots, logarithms, trigonometric and hyperbolic functions, absolute values, factorials
and a few more, and gives up on anything else. Values are exact rational numbers where possible,
else real or complex numbers of 80 digits. The length of a formula, its powers and the size of its
numbers are bounded, so that no answer takes long. At each point, every letter has a fixed value.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import comb, factorial, isqrt
from typing import Any
from zlib import crc32

import mpmath

# One notation for answers in mathematics, which may be written in LaTeX, Markdown, Unicode, or as
# Python prints them.

_SYMBOLS = {
    "\u2212\u2013\u2014\u2010\u2011": "-",
    "\u00d7\u22c5\u00b7\u2219\u2022": r"\times ",
    "\u00f7\u2215\u2044": "/",
    "\u221e": r"\infty ",
    "\u2264\u2a7d": r"\leq ",
    "\u2265\u2a7e": r"\geq ",
    "\u2260": r"\neq ",
    "\u2248": r"\approx ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u221b": r"\sqrt[3]",
    "\u00b0": r"^\circ ",
    "\u2032\u2019\u2018": "'",
    "\u230a": r"\lfloor ",
    "\u230b": r"\rfloor ",
    "\u2308": r"\lceil ",
    "\u2309": r"\rceil ",
    "\u27e8\u2329": r"\langle ",
    "\u27e9\u232a": r"\rangle ",
    "\u211d": r"\mathbb{R}",
    "\u20ac\u00a3\u00a5\uffe5\u201c\u201d": "",
}
GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau phi chi psi "
    "omega"
)
_UNICODE = {ord(sign): command for signs, command in _SYMBOLS.items() for sign in signs} | {
    ord(unicodedata.lookup(f"GREEK {case} LETTER {name.replace('lambda', 'lamda').upper()}")): rf"\{command} "
    for name in GREEK.split()
    for case, command in (("SMALL", name), ("CAPITAL", name.title()))
}
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
_SUBSCRIPTS = re.compile("[\u2080-\u208e]+")
_FRACTION_SIGN = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT_SIGN = re.compile(r"\u221a\s*(\d+(?:\.\d+)?|)")

_SPACING = (
    r"\\[,;:!> ]|\\(?:q?quad|enspace|thinspace|medspace|thickspace|hfill|displaystyle|textstyle|(?:no)?limits)"
    r"(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}|\\phantom\{[^{}]*\}|~"
)
_BRACKET_SIZES = r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\s*(?:\[[\d.\s]+[a-z]{2}\])?", r"\\cr "),
        (r"\\begin\{(?:cases|aligned|align\*?|gathered|split)\}(.*?)\\end\{\w+\*?\}", r"\1"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!|\\ )(?:\\!)?(?=\d{3}(?!\d))", ""),
        (r"\\?\$|\\[()\[\]]", " "),
        (_BRACKET_SIZES, ""),
        (_SPACING, " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d|\{\d+\})\s*(\d|\{\d+\})", r"\\frac{\1}{\2}"),
        (r"\{\{(\d+)\}\}", r"{\1}"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]+)\\choose(?![A-Za-z])([^{}]+)\}", r"\\binom{\1}{\2}"),
        (r"\\mathbb\s*(?:R|\{\s*R\s*\})", r"(-\\infty,\\infty)"),
        (r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf|cal)|operatorname\*?|boldsymbol|bm|emph)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:boxed|fbox|rm|bf|it|mathbf|mathrm)(?![A-Za-z])", " "),
        (r"\\p?mod\s*\{([^{}]*)\}|\\p?mod(?![A-Za-z])", r" mod \1"),
        (r"\\([%&#_])", r"\1"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:[lr]?vert|mid)(?![A-Za-z])", "|"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:leqslant|leqq|le)(?![A-Za-z])|<=", r"\\leq "),
        (r"\\(?:geqslant|geqq|ge)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\ne(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"==", "="),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}|\bset\(\)", r"\\emptyset "),
        (r"\\var(epsilon|phi|theta|rho|sigma)(?![A-Za-z])", r"\\\1"),
        (r"\\(?:cdot|ast)(?![A-Za-z])", r"\\times "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\[lc]?dots[a-z]?(?![A-Za-z])", "..."),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|(?<=[\d)}])\s*\bdeg(?:ree)?s?\b", r"\\deg "),
        (r"(\\deg) *(C|F)(?:elsius|ahrenheit)\b", r"\1 \2"),
        (r"(?<=\d) ?[xX] ?(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"& ?(?==)", ""),
        (r"\\prime(?![A-Za-z])|\^\{?'\}?", "'"),
        (r"\bper\s?cent\b|\bpct\b", "%"),
        (r"(?<=\d)\s*[aA]\.?\s?[mM]\b\.?", " am"),
        (r"(?<=\d)\s*[pP]\.?\s?[mM]\b\.?", " pm"),
        (r"\*\s*I\b", "*i"),
        (r"\bI\s*\*", "i*"),
        (r"\\bar(?![A-Za-z])", r"\\overline"),
        (r"\\overrightarrow(?![A-Za-z])", r"\\vec"),
        (r"\b(?:Fraction|Rational)\(\s*(-?\d+)\s*,\s*(\d+)\s*\)", r"(\\frac{\1}{\2})"),
        (r"\b(?:np\.\w+|Decimal|mpf)\(\s*'?([^()']*)'?\s*\)", r"\1"),
        (r"\b(?:Matrix|(?:np\.)?array)\(\s*(\[\[[^()]*\]\])\s*\)", r"\1"),
        (r"(?<=\d)j\b", "i"),
        (r"\boo\b|\binf(?:inity)?\b", r"\\infty "),
        (r"(?<=\d)\s*(?:\^\s*\{?\s*)?(?:st|nd|rd|th)\b\s*\}?", ""),
        (r"\(\s*([0-9A-F]+)\s*\)_", r"\1_"),
        (r"\s*[,;]\s*\b(?:and|or)\b\s*|(?<=[^\\])\s+(?:and|or)\s+(?=\S)|\s*;\s*", ", "),
        (r"(?<![\d.,/^_{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,])", r"\1\\frac{\2}{\3}"),
        (r"(?<![\d.,])(\d{1,3}) (?=\d{3}(?: \d{3})*(?![\d.]))", r"\1"),
    )
)  # fmt: skip
_BOLD = re.compile(r"(?<![\w)*}])(\*{2,3}|__|`+)(?=\S)([^*`]+?)(?<=\S)\1(?!\w)")
_ANSWER_OPENING = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|solution|result|option|choice)s?\b\s*(?:is|are|:|=)?\s*:?\s*(?=\S)",
    re.IGNORECASE,
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SYNONYMS = (
    (re.compile(r"(?:all|the)? ?real(?: number)?s?", re.IGNORECASE), r"(-\\infty,\\infty)"),
    (re.compile(r"no (?:real )?solutions?|(?:the )?empty set", re.IGNORECASE), r"\\emptyset"),
    (re.compile(r"\(?([A-J])\s?[).:]"), r"\1"),
)
_MAX_NUM_DIGITS = 60


def normalise_notation(answer: str) -> str:
    """Return an answer in one LaTeX-like notation: Unicode signs become commands; bracket sizes,
    spacing, math delimiters, boxes, bold type and openings such as "the answer is" are removed; a
    few phrases such as "no solution" and "per cent" become signs. Other words stay.
    """
    # Replace Unicode signs by commands, and remove invisible characters.
    text = _FRACTION_SIGN.sub(_fraction_sign_as_latex, answer)
    text = _ROOT_SIGN.sub(lambda match: rf"\sqrt{{{match[1]}}}" if match[1] else r"\sqrt ", text)
    for run, sign in ((_SUPERSCRIPTS, "^"), (_SUBSCRIPTS, "_")):
        text = run.sub(lambda match, sign=sign: f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}", text)  # type: ignore[misc]
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
    text = "".join(sign for sign in text if unicodedata.category(sign) != "Cf")
    text = _without_box(" ".join(text.split()))
    text = _REPEATING.sub(_repeating_as_fraction, _BOLD.sub(r"\2", text))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _ANSWER_OPENING.sub("", " ".join(text.split()))
    text = re.sub(r"^(?:=|\\approx) ?|(?<!\.)\.$|[,:;]+$", "", text).strip()
    for pattern, replacement in _SYNONYMS:
        if pattern.fullmatch(text):
            return pattern.sub(replacement, text)
    return text


def comparison_text(text: str) -> str:
    """Return a result of `normalise_notation` in the form for comparison as text: without needless
    braces, without spaces except between two numbers or words, and with words in lower case.
    """
    text = re.sub(r"(?<!\\)\b(?:[A-Za-z]{3,}|N[oO])\b", lambda match: match[0].lower(), text)
    text = re.sub(r"(?<=\d)\s+(?=\d)|(?<=[A-Za-z]{2})\s+(?=[A-Za-z]{2})", "\0", text)
    text = re.sub(r"(\\[A-Za-z]+)\0", r"\1", "".join(text.split()))
    text = re.sub(r"([_^]|\\[A-Za-z]+)\{([A-Za-z0-9])\}", r"\1\2", text)
    return re.sub(r"_\{(\d+)\}", r"_\1", text).replace("\0", " ")


def _fraction_sign_as_latex(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _repeating_as_fraction(match: re.Match[str]) -> str:
    """Return a number with repeating decimals as a fraction; unchanged if it has too many
    digits.
    """
    integer, prefix, period = match[1] or "0", match[2], match[3]
    if len(integer + prefix + period) > _MAX_NUM_DIGITS:
        return match[0]
    top = int(integer + prefix + period) - int(integer + prefix)
    return rf"(\frac{{{top}}}{{{10 ** len(prefix) * (10 ** len(period) - 1)}}})"


def _without_box(text: str) -> str:
    """Return a text without the box around all of it, if there is one, as in some gold answers."""
    text = text.strip()
    match = _BOX.match(text)
    if not match:
        return text
    depth = 0
    for index, sign in enumerate(text[match.end() - 1 :], start=match.end() - 1):
        depth += (sign == "{") - (sign == "}")
        if not depth:
            rest = text[index + 1 :].strip(" .$")
            return _without_box(text[match.end() : index]) if not rest else text
    return text


# A normal form of answers in LaTeX, for the many ways to write one answer, such as `\dfrac12` and
# `1/2`.
#
# Source of the list of rules: ET-Agent (arXiv 2601.06860), evaluation.

_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:>]|\\ |\^\{?\\circ\}?|\\degree|\\?[$%]|°|~")
_UNITS = re.compile(r"\\(?:text|textbf|mbox|mathrm)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?$")
_MIXED = re.compile(r"(?<![\d.,])(\d+)\s+([1-9]\d*)/(\d+)(?![\d.,])")
_ASSIGNED = re.compile(r"^[A-Za-z]{1,2}=(?!=)")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_LATEX_TOKEN = r"(\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[A-Za-z0-9])"
_FRACTION = re.compile(rf"\\frac{_LATEX_TOKEN}{_LATEX_TOKEN}")
_ROOT = re.compile(rf"\\sqrt{_LATEX_TOKEN}")
_RATIO = re.compile(r"^(-?)(\d+)/(\d+)$")


def normal_form(answer: str) -> str:
    """Return an answer without spaces, bracket sizes, currency, per cent and degree signs, and
    units at its end; with braced arguments, and with ratios of whole numbers as fractions. If all
    of it is a text command, such as `\\text{even}`, return its words.
    """
    text = _DROPPED.sub("", answer.strip().rstrip(".")).replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"\\[dt]frac", r"\\frac", text).strip()
    text = _UNITS.sub("", text) or _UNITS.sub(r"\1", text)
    text = re.sub(r"\s+", "", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = _ASSIGNED.sub("", text)
    if _GROUPED.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    text = _FRACTION.sub(lambda match: rf"\frac{_braced(match[1])}{_braced(match[2])}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{_braced(match[1])}", text)
    text = _RATIO.sub(r"\1\\frac{\2}{\3}", text)
    return r"\frac{1}{2}" if text == "0.5" else text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


MAX_NUM_CHARACTERS = 400
NUM_POINTS = 6
_MAX_NUM_BITS = 20_000
"""The most bits of a rational number."""
_MAX_EXPONENT = 100_000
"""The most binary digits before or after the point of a number that is not rational."""
_MAX_FACTORIAL = 1000
_PRECISION_DIGITS = 80
_RELATIVE_TOLERANCE = 1e-50
_ABSOLUTE_TOLERANCE = 1e-50
_MIN_PRINTED_DIGITS = 15
_PRINTED_TOLERANCE = 1e-13
_PRINTED_ABSOLUTE_TOLERANCE = 1e-14

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
_MULTIPLICATION_SIGNS = ("*", r"\times")
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
_END_TOKENS = frozenset({"", "+", "-", ")", "]", "}", r"\}", ",", r"\rfloor", r"\rceil", "&", r"\pm", r"\mp"})
_FRACTION_TOKENS = (r"\frac", "{", "}", "{", "}")
"""The tokens of a fraction, without its two numbers."""
_LETTERS = frozenset(rf"\{form}" for name in GREEK.split() for form in (name, name.title()) if name != "pi") | {r"\ell"}
"""The commands that stand for letters."""
_INTEGER_LETTERS = frozenset("jklmnpq")
"""Letters that usually stand for whole numbers."""
_INTEGER_LETTER_VALUES = (5, 3, 8, -4, 11, 6)

Value = Any
"""A `Fraction`, or a real or complex number of mpmath."""


# math-verify is not used: its time limits are signals, which work in the main thread only, while
# worlds run in threads; and it reads the first number of a text, so that 12:30 equals 12:45.
# SymPy's `parse_expr` evaluates its input as Python.
class FormulaError(Exception):
    """A text that is not a formula, or is too long or too large."""


class _UndefinedError(Exception):
    """A formula has no value at a point."""


def tokenise(text: str) -> list[str]:
    """Return the tokens of a formula; adjacent letters are one token. Numbers and letters keep a
    space before them, since 1 2 is not 12, and 5 cm is not 5cm.

    Raises `FormulaError` for a text with other signs, or one that is too long.
    """
    if len(text) > MAX_NUM_CHARACTERS:
        raise FormulaError
    result: list[str] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise FormulaError
        position = token.end()
        spaced = result and token[0][0].isspace() and (token["number"] or token["letters"])
        result.append(f" {token[0].strip()}" if spaced else token[0].strip())
    return result


def has_printed_float(parts: Sequence[str]) -> bool:
    """Return whether a formula has a number with a point or an exponent and at least 15 digits, the
    zeros in front not counted: one that a program printed, whose last digits may be wrong.
    """
    return any(
        ("." in token or "e" in token.lower())
        and token[0] in "0123456789."
        and len(re.sub(r"[eE].*|\.", "", token).lstrip("0")) >= _MIN_PRINTED_DIGITS
        for token in map(str.strip, parts)
    )


def evaluate(parts: Sequence[str]) -> list[Value | None]:
    """Return the value of a formula at each of `NUM_POINTS` points, None where it is undefined.
    Raises `FormulaError`.
    """
    parts = [token.strip() for token in parts]
    if _is_word(parts):
        raise FormulaError
    # Letters are read one by one; a letter with its subscript is one.
    letters: list[str] = []
    for token in parts:
        letters += [token] if token in _NAMES or not token.isalpha() else list(token)
    symbols: list[str] = []
    position = 0
    while position < len(letters):
        token = letters[position]
        position += 1
        if position < len(letters) and letters[position] == "_" and _is_variable(token):
            below, position = _read_subscript(letters, position + 1)
            token = f"{token}_{below}"
        symbols.append(token)
    if _DATE.fullmatch("".join(symbols)):
        raise FormulaError
    is_constant = not any(_is_variable(token) for token in symbols)
    results: list[Value | None] = []
    for point in range(1 if is_constant else NUM_POINTS):
        try:
            results.append(_Parser(symbols, point).parse())
        except (_UndefinedError, ZeroDivisionError):
            results.append(None)
        except (OverflowError, ValueError, TypeError, RecursionError, mpmath.libmp.NoConvergence) as error:
            raise FormulaError from error
    return results * (NUM_POINTS if is_constant else 1)


def is_equal(a: Sequence[Value | None], b: Sequence[Value | None], *, printed: bool) -> bool:
    """Return whether two formulas have the same values at all points where both are defined, which
    must be more than half; `printed` values may differ in their last digits.
    """
    pairs = zip(a, b, strict=True)
    value_pairs = [(first, second) for first, second in pairs if first is not None and second is not None]
    if 2 * len(value_pairs) <= len(a):
        return False
    return all(is_close(first, second, printed=printed) for first, second in value_pairs)


def is_close(a: Value, b: Value, *, printed: bool = False) -> bool:
    """Return whether two numbers are the same: rational ones exactly, others to a relative or
    absolute 1e-50; if `printed`, only to a relative 1e-13.
    """
    if isinstance(a, Fraction) and isinstance(b, Fraction) and not printed:
        return a == b
    first, second = _to_real(a), _to_real(b)
    distance, size = abs(first - second), max(abs(first), abs(second))
    if printed and 0 in (a, b):
        return bool(distance <= _PRINTED_ABSOLUTE_TOLERANCE)
    return bool(
        distance <= size * (_PRINTED_TOLERANCE if printed else _RELATIVE_TOLERANCE) or distance <= _ABSOLUTE_TOLERANCE
    )


def constant_ratio(a: Sequence[Value | None], b: Sequence[Value | None]) -> Value | None:
    """Return the constant factor between the values of two formulas (the first divided by the
    second); None if there is none, or it is 0.
    """
    factors = [
        _quotient(first, second)
        for first, second in zip(a, b, strict=True)
        if first is not None and second is not None and not is_close(second, Fraction(0))
    ]
    is_constant = len(factors) > NUM_POINTS // 2 and all(is_close(factors[0], factor) for factor in factors)
    return factors[0] if is_constant and not is_close(factors[0], Fraction(0)) else None


def differences(a: Sequence[Value | None], b: Sequence[Value | None]) -> list[Value | None]:
    """Return the differences of the values of two formulas, None where either is undefined."""
    pairs = zip(a, b, strict=True)
    return [
        None if first is None or second is None else _sum(first, _times(Fraction(-1), second))
        for first, second in pairs
    ]


_THREAD_LOCAL = threading.local()


def _context() -> Any:
    # The precision of mpmath's global context is shared by all threads.
    if not hasattr(_THREAD_LOCAL, "context"):
        _THREAD_LOCAL.context = mpmath.MPContext()
        _THREAD_LOCAL.context.dps = _PRECISION_DIGITS
    return _THREAD_LOCAL.context


def _to_real(value: Value) -> Any:
    if not isinstance(value, Fraction):
        return value
    return _context().mpf(value.numerator) / value.denominator


def _require_bounded(value: Value) -> Value:
    """Return the value. Raises `FormulaError` if it is too large, and `_UndefinedError` if it is
    not finite.
    """
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_NUM_BITS:
            raise FormulaError
        return value
    context = _context()
    if context.isnan(value) or context.isinf(value):
        raise _UndefinedError
    if value and abs(context.mag(value)) > _MAX_EXPONENT:
        raise FormulaError
    return value


def _sum(a: Value, b: Value) -> Value:
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return _require_bounded(a + b if exact else _to_real(a) + _to_real(b))


def _times(a: Value, b: Value) -> Value:
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return _require_bounded(a * b if exact else _to_real(a) * _to_real(b))


def _quotient(a: Value, b: Value) -> Value:
    if b == 0:
        raise _UndefinedError
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return _require_bounded(a / b if exact else _to_real(a) / _to_real(b))


def _power(base: Value, exponent: Value) -> Value:
    """Return a power: exact for whole powers of rational numbers and for rational roots.

    Raises `FormulaError` if it is too large, and `_UndefinedError` for 0 to a negative or complex
    power.
    """
    if base == 0:
        if exponent != abs(exponent) if not _is_complex(exponent) else True:
            raise _UndefinedError
        return Fraction(0 if exponent else 1)
    size = abs(_to_real(exponent)) * max(1, abs(_context().mag(_to_real(base))))
    if size > _MAX_EXPONENT:
        raise FormulaError
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1:
            if bits * abs(exponent) > _MAX_NUM_BITS:
                raise FormulaError
            return base**exponent.numerator
        if base > 0:
            top, bottom = (_whole_root(part, exponent.denominator) for part in (base.numerator, base.denominator))
            if top is not None and bottom is not None:
                return _power(Fraction(top, bottom), Fraction(exponent.numerator))
    return _require_bounded(_context().power(_to_real(base), _to_real(exponent)))


def _root(value: Value, degree: Value) -> Value:
    odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2
    if odd and not _is_complex(value) and value < 0:
        return _times(Fraction(-1), _root(-value, degree))
    return _power(value, _quotient(Fraction(1), degree))


def _whole_root(number: int, degree: int) -> int | None:
    if degree == 2:
        root = isqrt(number)
    elif number.bit_length() <= 3 * _PRECISION_DIGITS:
        root = int(_context().nint(_context().root(number, degree)))
    else:
        return None
    return root if root**degree == number else None


def _is_complex(value: Value) -> bool:
    return not isinstance(value, Fraction) and bool(_context().im(value))


def _apply_function(name: str, value: Value, base: Value | None = None) -> Value:
    """Return a function of a number; `base` is that of a logarithm. Raises `FormulaError` if the
    number is too large, and `_UndefinedError` if the function has no value there.
    """
    context = _context()
    if name in ("sqrt", "cbrt"):
        return _root(value, Fraction(3 if name == "cbrt" else 2))
    if name in ("abs", "floor", "ceil"):
        if not isinstance(value, Fraction):
            if name != "abs" and value and context.mag(value) > _PRECISION_DIGITS:
                raise FormulaError
            return _require_bounded(getattr(context, {"abs": "fabs"}.get(name, name))(value))
        return abs(value) if name == "abs" else Fraction(value // 1 if name == "floor" else -(-value // 1))
    number = _to_real(value)
    if name in ("ln", "log", "lg"):
        if number == 0:
            raise _UndefinedError
        low = base if base is not None else Fraction(10) if name == "lg" else None
        return _require_bounded(context.ln(number) if low is None else context.ln(number) / context.ln(_to_real(low)))
    if name in ("exp", "sinh", "cosh", "tanh") and abs(number) > _MAX_EXPONENT // 2:
        raise FormulaError
    if number and context.mag(number) > 2 * _PRECISION_DIGITS:
        raise FormulaError
    return _require_bounded(getattr(context, _INVERSE.get(name, name))(number))


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise _UndefinedError
    if value > _MAX_FACTORIAL:
        raise FormulaError
    return Fraction(factorial(int(value)))


def _binomial(top: Value, bottom: Value) -> Value:
    if not all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (top, bottom)):
        raise _UndefinedError
    if top > _MAX_FACTORIAL:
        raise FormulaError
    return Fraction(comb(int(top), int(bottom)))


def _read_subscript(parts: Sequence[str], position: int) -> tuple[str, int]:
    """Return the subscript at a position, and the position after it. Raises `FormulaError` if it is
    missing or not closed.
    """
    if position >= len(parts):
        raise FormulaError
    if parts[position] != "{":
        return parts[position], position + 1
    depth = 0
    for end in range(position, len(parts)):
        depth += (parts[end] == "{") - (parts[end] == "}")
        if not depth:
            return "".join(parts[position + 1 : end]), end + 1
    raise FormulaError


def _is_variable(token: str) -> bool:
    if token.startswith("\\"):
        return token in _LETTERS or token.partition("_")[0] in _LETTERS
    return token[0].isalpha() and token not in _NAMES and token not in ("e", "i")


def _is_word(parts: Sequence[str]) -> bool:
    """Return whether tokens are a word, a code or a sequence of choices, such as `cat`, `1A` or
    `BDCA`, rather than a product such as `ab` or `2xyz`: the order of their letters matters.
    """
    names = [token for token in parts if token.isalpha() and token not in _NAMES]
    if any(len(name) > 4 or (len(name) > 1 and not (name.islower() or name.isupper())) for name in names):
        return True
    letters = "".join(parts)
    if not names or len(letters) < 2 or not all(token.isalnum() and token not in _NAMES for token in parts):
        return False
    return any(map(str.isupper, names)) or (len(letters) > 2 and letters[0].isalpha())


@cache
def _letter_value(letter: str, point: int) -> Fraction:
    """Return the value of a letter at a point, which depends on the letter and has either sign."""
    code = crc32(letter.encode())
    if letter in _INTEGER_LETTERS:
        return Fraction(_INTEGER_LETTER_VALUES[(point + ord(letter)) % len(_INTEGER_LETTER_VALUES)])
    size = Fraction(97 + 31 * (code % 23) + 17 * point, 53 + 7 * (code % 29))
    sign = (1, -1)[point] if point < 2 else (-1) ** (code >> point & 1)
    return sign * size


class _Parser:
    """A recursive-descent parser of one formula at one point."""

    def __init__(self, parts: Sequence[str], point: int) -> None:
        self._tokens = list(parts)
        self._point = point
        self._position = 0
        self._num_open_bars = 0

    def parse(self) -> Value:
        value = self._parse_sum()
        if self._next_token:
            raise FormulaError
        return value

    def _parse_sum(self) -> Value:
        total = self._parse_product()
        while self._next_token in ("+", "-"):
            sign = Fraction(1 if self._take_token() == "+" else -1)
            total = _sum(total, _times(sign, self._parse_product()))
        return total

    def _parse_product(self, *, in_argument: bool = False) -> Value:
        """Return a product. `in_argument` is for the argument of a function without brackets: it
        ends before a multiplication or division sign, or the next function.
        """
        total = self._parse_signed()
        while self._next_token not in _END_TOKENS and not (self._next_token == "|" and self._num_open_bars):
            if in_argument and (
                self._next_token in _MULTIPLICATION_SIGNS or self._next_token == "/" or _is_function(self._next_token)
            ):
                break
            if self._next_token in _MULTIPLICATION_SIGNS:
                self._take_token()
                total = _times(total, self._parse_signed())
            elif self._next_token in ("/", r"\over"):
                self._take_token()
                total = _quotient(total, self._parse_signed())
            elif self._next_token[0] in "0123456789." and (
                self._tokens[self._position - 1][0] in "0123456789."
                or self._tokens[self._position + 1 : self._position + 2] not in (["^"], ["**"])
            ):
                # Two numbers side by side are not their product, and x2 may be x with an index; but
                # (n-1)2^n is a product.
                raise FormulaError
            else:
                total = _times(total, self._parse_power())
        return total

    def _parse_signed(self) -> Value:
        sign = Fraction(1)
        while self._next_token in ("+", "-"):
            sign *= 1 if self._take_token() == "+" else -1
        return _times(sign, self._parse_power())

    def _parse_power(self) -> Value:
        base = self._parse_atom()
        while self._next_token in ("!", r"\deg"):
            base = _factorial(base) if self._take_token() == "!" else _times(base, +_context().pi / 180)
        if self._next_token not in ("^", "**"):
            return base
        self._take_token()
        value = _power(base, self._parse_signed())
        while self._next_token == "!":
            self._take_token()
            value = _factorial(value)
        return value

    def _parse_atom(self) -> Value:
        token = self._take_token()
        name = token.removeprefix("\\")
        if token[0] in "0123456789.":
            _, _, exponent = token.lower().partition("e")
            if exponent and abs(int(exponent)) > _MAX_FACTORIAL:
                raise FormulaError
            if len(token) > 1 and token.isdigit() and token[0] == "0" and len(self._tokens) > 2:
                # 2024-01-05 is a date.
                raise FormulaError
            number = _require_bounded(Fraction(token.rstrip(".")))
            return _sum(number, self._parse_atom()) if self._is_mixed(token) else number
        if token in ("(", "[", "{"):
            return self._parse_until(_CLOSING[token])
        if token == "|":
            self._num_open_bars += 1
            value = self._parse_sum()
            self._num_open_bars -= 1
            if self._take_token() != "|":
                raise FormulaError
            return _apply_function("abs", value)
        if token in (r"\lfloor", r"\lceil"):
            return _apply_function(
                "floor" if token == r"\lfloor" else "ceil", self._parse_until(token.replace("\\l", "\\r"))
            )
        if token in (r"\frac", r"\binom"):
            top = self._parse_argument()
            bottom = self._parse_argument()
            return _quotient(top, bottom) if token == r"\frac" else _binomial(top, bottom)
        if token == r"\sqrt":
            degree = self._parse_until("]") if self._next_token == "[" and self._take_token() else Fraction(2)
            return _root(self._parse_argument(), degree)
        if name == "pi":
            return +_context().pi
        if _is_function(token):
            return self._parse_function(name)
        if token == "e":
            return _context().e
        if token == "i":
            return _context().mpc(0, 1)
        if _is_variable(token):
            return _letter_value(token, self._point)
        raise FormulaError

    def _parse_function(self, name: str) -> Value:
        base = power = None
        if self._next_token == "_":
            self._take_token()
            base = self._parse_argument()
        if self._next_token in ("^", "**"):
            self._take_token()
            power = self._parse_argument()
        bracket = self._next_token in ("(", "{", "[")
        value = self._parse_atom() if bracket else self._parse_product(in_argument=True)
        if power == -1 and f"arc{name}" in _INVERSE:
            return _apply_function(f"arc{name}", value)
        value = _apply_function(name, value, base)
        return value if power is None else _power(value, power)

    def _parse_argument(self) -> Value:
        """Return the value of a command's argument: a group, or else a single digit or symbol."""
        token = self._next_token
        if len(token) > 1 and token[0].isdigit():
            self._tokens[self._position : self._position + 1] = [token[0], token[1:]]
        if token == "-":
            self._take_token()
            return _times(Fraction(-1), self._parse_argument())
        return self._parse_atom()

    def _is_mixed(self, number: str) -> bool:
        r"""Return whether the number just taken begins a mixed number, such as 3\frac{1}{2}."""
        before = self._tokens[self._position - 2 : self._position - 1]
        ahead = self._tokens[self._position : self._position + 7]
        if (
            not number.isdigit()
            or before in (["^"], ["**"])
            or (*ahead[:2], *ahead[3:5], *ahead[6:]) != _FRACTION_TOKENS
        ):
            return False
        return ahead[2].isdigit() and ahead[5].isdigit() and int(ahead[2]) < int(ahead[5])

    def _parse_until(self, closing: str) -> Value:
        bars, self._num_open_bars = self._num_open_bars, 0
        value = self._parse_sum()
        self._num_open_bars = bars
        if self._take_token() != closing:
            raise FormulaError
        return value

    @property
    def _next_token(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take_token(self) -> str:
        token = self._next_token
        if not token:
            raise FormulaError
        self._position += 1
        return token


def _is_function(token: str) -> bool:
    name = token.removeprefix("\\")
    return name in _FUNCTIONS or name in _INVERSE or name in ("abs", "floor", "ceil")
