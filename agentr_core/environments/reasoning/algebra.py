"""Comparison of two answers in mathematics by what they mean: numbers, formulas, tuples, sets,
intervals, matrices, equations, inequalities.

An answer is parsed into a tree of nodes, whose leaves are formulas; see `formulas` for their
values. Comparison is symmetric, and every answer is the same as itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

from agentr_core.environments.reasoning.formulas import (
    MOST_CHARACTERS,
    Unreadable,
    Value,
    bare,
    difference,
    equal,
    has_printed_float,
    plain,
    ratio,
    tokens,
    values,
)

# Units at the end of an answer in mathematics, such as cm, percent or dollars.

_ALIASES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter millilitre mL",
    "l": "liter litre L",
    "ms": "millisecond",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "d": "day",
    "wk": "week",
    "yr": "year",
    "mph": "",
    "kph": "",
    "hz": "hertz Hz",
    "n": "newton N",
    "j": "joule J",
    "w": "watt W",
    "v": "volt V",
    "k": "kelvin K",
    "mol": "mole",
    "rad": "radian",
    "cent": "",
    "dollar": "buck USD usd",
    "euro": "EUR",
    "unit": "",
    "am": "",
    "pm": "",
}
_NORMAL = {alias: unit for unit, aliases in _ALIASES.items() for alias in (unit, *aliases.split())}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_TIMES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ANY = "unit"
_NO_UNITS = frozenset(
    {"pi", "and", "or", "mod", "base", "if", "for", "is", "sin", "cos", "tan", "ln", "log", "exp", "sqrt"}
)
_WORD = r"[A-Za-z]+"
_END = re.compile(rf"(?P<word>{_WORD})\s*(?P<power>\^\s*(?:\{{\s*)?(?P<exponent>-?[123])(?:\s*\}})?)?\s*$")

_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_OVER = re.compile(rf"\s{_WORD}(?:\s*\^\s*\{{?\s*\d\s*\}}?)?\s*/\s*$")


@dataclass(frozen=True)
class Quantity:
    """The text of a value and its unit, which is empty if it has none."""

    value: str
    unit: str = ""
    power: int = 0
    """The power of ten by which a word such as million multiplies the value."""

    def compatible(self, b: Quantity) -> bool:
        """Return whether the units do not contradict each other: equal, or missing on one side, for
        example.
        """
        units = {self.unit, b.unit}
        if len(units) == 1 or "" in units or any(unit.partition("^")[0] == _ANY for unit in units):
            return True
        return "deg" in units and all(unit.startswith("deg") for unit in units)

    def factors(self, b: Quantity) -> Iterator[tuple[Fraction, Fraction]]:
        """Yield pairs of factors for the two values; they are the same if one pair makes them
        equal. For 50%, both 50 and 0.5 are tried.
        """
        scale, other_scale = Fraction(10) ** self.power, Fraction(10) ** b.power
        yield scale, other_scale
        if (self.unit == "%") != (b.unit == "%"):
            yield (scale / 100, other_scale) if self.unit == "%" else (scale, other_scale / 100)


def quantity(text: str) -> Quantity:
    """Return the value and the unit of an answer in the notation of `formulas.plain`."""
    text = text.strip()
    if text.endswith("%"):
        return Quantity(text[:-1].strip(), "%")
    if match := re.fullmatch(r"(.*\S)\s*\\deg\s*([CFK]?)", text):
        return Quantity(match[1], f"deg{match[2]}")
    unit, rest = _unit_at_the_end(text)
    power = 0
    while (times := re.fullmatch(rf"(.*[\d)}}])\s*({'|'.join(_TIMES)})s?", rest, re.IGNORECASE)) is not None:
        rest, power = times[1], power + _TIMES[times[2].lower()]
    return Quantity(rest, unit, power)


def _unit_at_the_end(text: str) -> tuple[str, str]:
    """Return the unit at the end of a text in normal form, and the text before it; an empty unit
    and the whole text if there is none.
    """
    rest = text
    words: list[str] = []
    while (match := _END.search(rest)) is not None:
        before = rest[: match.start()]
        word = match["word"]
        if not _is_unit(word, before) or before.rstrip().endswith(("\\", "_", "^")):
            break
        words.insert(0, _normal(word) + (f"^{match['exponent']}" if match["power"] else ""))
        rest = before.rstrip()
        if rest.endswith("/"):
            words.insert(0, "/")
            rest = rest[:-1].rstrip()
    if not words or not re.search(r"\d|\\pi|\\sqrt|\\frac", rest) or words[0] == "/":
        return "", text
    # Square feet is ft^2, miles per hour is mi/h.
    unit: list[str] = []
    power = 0
    for word in words:
        if word in _POWERS and word.endswith("d") and unit:
            unit[-1] = f"{unit[-1]}^{_POWERS[word]}"
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in ("per", "/"):
            unit.append("/")
        else:
            unit.append(f"{word}^{power}" if power else word)
            power = 0
    return {"mi/h": "mph", "km/h": "kph"}.get("".join(unit), " ".join(unit).replace(" / ", "/")), rest


def _is_unit(word: str, before: str) -> bool:
    if word in _NO_UNITS or word.lower().removesuffix("s") in _TIMES or before.endswith("\\"):
        return False
    if not before or re.search(r"[-+*=<>(,]\s*$", before):
        return False
    is_unit_word = word in _NORMAL or word.removesuffix("s") in _NORMAL or word.lower() in (*_POWERS, "per")
    spaced = before[-1:].isspace() or before.endswith("/")
    if len(word) == 1:
        # The h is a letter of a formula in 2 r h, and an hour in 2 m/h.
        return is_unit_word and spaced and not _LETTER.search(_OVER.sub("", before))
    return is_unit_word or (len(word) > 2 and spaced and word[1:].islower())


def _normal(word: str) -> str:
    for form in (word, word.lower()):
        for name in (form, form.removesuffix("s"), form.removesuffix("es")):
            if name in _NORMAL:
                return _NORMAL[name]
    return word.lower().removesuffix("s")


_MOST_PARTS = 40
_OPENING, _CLOSING = ("(", "[", "{", r"\{", r"\langle", r"\begin"), (")", "]", "}", r"\}", r"\rangle", r"\end")
_TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_RELATIONS = ("=", r"\neq", r"\approx", *_TURNED)
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_LABELLED = re.compile(r"(?:\(([A-J])\)\s*|([A-J])\s?[):]\s+)(\S.*)")
_LOGARITHM = re.compile(r"\\?(?<![A-Za-z])log(?![A-Za-z]|\s*_)")
_MATRIX = re.compile(
    r"\s*\\begin\s*\{\s*([bpvBV]?(?:small)?matrix|array)\s*\}(?:\s*\{[lcr|\s]*\})?(.*)\\end\s*\{\s*\1\s*\}\s*"
)
_NAME = re.compile(
    r"(?:m?\\(?:angle|triangle|overline|overarc|widehat)\{?)?(?:(?:\\(?!times|infty|pi(?![a-z]))[a-z]+|[A-Za-z])(?:_(?:\w|\{[^{}]*\}))?'*){1,3}\}?"
    r"(?:\((?:[A-Za-z0-9,]|\\[a-z]+)*\))?|[A-Z][a-z]{2,}"
    r"|\\frac\{d[a-z]\}\{d[a-z]\}"
)
_BOUND_NAMES = re.compile(r"(?:\(|\\\{)(?:[A-Za-z](?:_(?:\w|\{\w+\}))?,?)+(?:\)|\\\})|\|[A-Za-z]{1,2}\||\[[A-Z]{3,}\]")
_TOTAL = re.compile(r"[a-z](?:\+[a-z])+")
_INFINITE = ("\\infty", "+\\infty", "-\\infty")


def same_value(a: str, b: str) -> bool:
    """Return whether two answers mean the same; an empty answer equals none.

    Formulas with letters are compared by their values at several points. What cannot be parsed is
    compared as text, without spaces and the case of words.
    """
    if not a.strip() or not b.strip():
        return False
    if a.split() == b.split():
        return True
    if max(len(a), len(b)) > 4 * MOST_CHARACTERS:
        return False
    for first, second in product(_readings(plain(a)), _readings(plain(b))):
        if _same_text(first, second):
            return True
        with suppress(Unreadable, RecursionError):
            if _same(_node(tokens(first)), _node(tokens(second))):
                return True
    return False


def _same_text(a: str, b: str) -> bool:
    return bool(bare(a)) and bare(a) == bare(b)


def _readings(text: str) -> Iterator[str]:
    """Yield the possible meanings of a text: 1,234 is a number or a list of two, log is to the base
    e or 10, and (A) 5 is the choice A or its value.
    """
    yield text
    ungrouped_text = _GROUPED.sub(lambda match: _ungrouped(match, text), text)
    if ungrouped_text != text:
        yield ungrouped_text
    if (decimal := _LOGARITHM.sub(r"\\lg ", text)) != text:
        yield decimal
    if choice := _LABELLED.fullmatch(text):
        yield from filter(None, choice.groups())


def _ungrouped(match: re.Match[str], text: str) -> str:
    """Return a grouped number without its commas; unchanged within brackets, where it may be
    several elements of a tuple or set.
    """
    before = text[: match.start()]
    inside = sum(before.count(sign) for sign in "([") + before.count(r"\{") - sum(before.count(sign) for sign in ")]")
    return match[0] if inside - before.count(r"\}") > 0 else match[0].replace(",", "")


@dataclass(frozen=True)
class _Node:
    """A node of the tree of an answer: its kind, its parts, and the tokens that it was read from.

    The kinds are `leaf`, `list` (also a set), the brackets of a tuple or interval such as `(]`,
    `union`, `matrix` and `determinant` (rows, each a tuple), `ratio`, and `relation` (its signs are
    in `signs`).
    """

    kind: str
    parts: tuple[_Node, ...] = ()
    tokens: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        return bare("".join(self.tokens))

    @cached_property
    def quantity(self) -> Quantity:
        return quantity("".join(self.tokens))

    @cached_property
    def number(self) -> list[Value | None]:
        """The values of the formula at each point, without its unit. Raises `Unreadable`."""
        return values(tokens(self.quantity.value))

    @property
    def angle(self) -> list[Value | None]:
        """The values at each point, with degrees as radians. Raises `Unreadable`."""
        return values(self.tokens) if self.quantity.unit == "deg" else self.number


def _node(parts: Sequence[str]) -> _Node:
    elements = _elements(parts)
    return elements[0] if len(elements) == 1 else _Node("list", elements, tuple(parts))


def _elements(parts: Sequence[str]) -> tuple[_Node, ...]:
    r"""Return the nodes between commas; one with \pm or \mp becomes two. Raises `Unreadable`."""
    nodes: list[_Node] = []
    for part in _split(parts, (",", r"\cr")):
        if part[:1] != [r"\{"] and (r"\pm" in part or r"\mp" in part):
            for up, down in (("+", "-"), ("-", "+")):
                nodes.append(_element([{r"\pm": up, r"\mp": down}.get(token, token) for token in part]))
        elif part:
            nodes.append(_element(part))
    return tuple(nodes)


def _element(parts: Sequence[str]) -> _Node:
    """Return the node of the tokens between two commas. Raises `Unreadable`."""
    if matrix := _matrix(parts):
        return matrix
    union = _split(parts, (r"\cup",))
    if len(union) > 1:
        return _Node("union", tuple(map(_element, union)), tuple(parts))
    member = _split(parts, (r"\in",))
    if len(member) == 2 and _is_name(member[0]):
        return _element(member[1])
    operands = _split(parts, _RELATIONS)
    if len(operands) > 1:
        signs, depth = [], 0
        for token in parts:
            depth += (token in _OPENING) - (token in _CLOSING)
            if token in _RELATIONS and not depth:
                signs.append(token)
        return _Node("relation", tuple(map(_element, operands)), tuple(parts), tuple(signs))
    ratio_parts = _split(parts, (":",))
    if len(ratio_parts) > 1 and "|" not in parts:
        return _Node("ratio", tuple(map(_element, ratio_parts)), tuple(parts))
    return _bracketed(parts) or _Node("leaf", tokens=tuple(parts))


def _bracketed(parts: Sequence[str]) -> _Node | None:
    if len(parts) < 2 or parts[0] not in _OPENING or parts[-1] not in _CLOSING or r"\begin" in parts[:1]:
        return None
    try:
        inner = _split(parts[1:-1], (",",))
    except Unreadable:
        return None
    opening, closing = parts[0], parts[-1]
    if opening == r"\{" or (opening == "{" and len(inner) > 1):
        of_those = _split(parts[1:-1], ("|", ":"))
        if len(of_those) == 2 and _is_name(of_those[0]):
            return _element(of_those[1])
        return _Node("list", _elements(parts[1:-1]), tuple(parts))
    if len(inner) == 1:
        # Brackets around one value do not matter.
        is_pair = {"(": ")", "[": "]", "{": "}"}.get(opening) == closing
        return _element(inner[0]) if is_pair and not _is_formula_in_brackets(parts) else None
    if opening == "[" and all(row[0] == "[" and row[-1] == "]" for row in inner if row):
        rows = [_split(row[1:-1], (",",)) for row in inner]
        return _Node("matrix", tuple(_Node("()", tuple(map(_element, row))) for row in rows), tuple(parts))
    if (opening, closing) == ("[", "]") and len(inner) != 2:
        return _Node("list", tuple(map(_element, inner)), tuple(parts))
    if opening in "([" and closing in ")]" and (opening + closing in ("()", "[]") or len(inner) == 2):
        return _Node(opening + closing, tuple(map(_element, inner)), tuple(parts))
    if opening == r"\langle":
        return _Node("()", tuple(map(_element, inner)), tuple(parts))
    return None


def _is_formula_in_brackets(parts: Sequence[str]) -> bool:
    """Return whether the first and the last bracket do not belong together, as in (x+1)(x-1)."""
    depth = 0
    for token in parts[:-1]:
        depth += (token in _OPENING) - (token in _CLOSING)
        if not depth:
            return True
    return False


def _matrix(parts: Sequence[str]) -> _Node | None:
    if parts[:1] in (["("], ["["]) and r"\begin" in parts[1:3] and parts[-1] in (")", "]"):
        parts = parts[1:-1]
    match = _MATRIX.fullmatch("".join(parts)) if parts[:1] == [r"\begin"] else None
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row for row in _split(tokens(match[2]), (r"\cr",)) if row]
    kind = "determinant" if match[1][0] in "vV" else "matrix"
    return _Node(kind, tuple(_Node("()", tuple(map(_element, _split(row, ("&",))))) for row in rows), tuple(parts))


def _split(parts: Sequence[str], signs: Sequence[str]) -> list[list[str]]:
    """Return the groups of tokens between the given signs, outside brackets. Raises `Unreadable` if
    brackets do not match, or there are too many groups.
    """
    groups: list[list[str]] = [[]]
    depth = 0
    for token in parts:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            raise Unreadable
        if token in signs and not depth:
            groups.append([])
        else:
            groups[-1].append(token)
    if depth or len(groups) > _MOST_PARTS:
        raise Unreadable
    return groups


def _same(a: _Node, b: _Node) -> bool:
    if a.text and a.text == b.text:
        return True
    a, b = _without_names(a, b), _without_names(b, a)
    if a.kind == b.kind == "relation":
        return _same_relations(a, b)
    if a.kind == b.kind == "leaf":
        return _same_leaves(a, b)
    intervals = [_intervals(node) for node in (a, b)]
    if all(intervals) and any(node.kind in ("relation", "union", "list") for node in (a, b)):
        return _in_any_order(intervals[0], intervals[1])
    if {a.kind, b.kind} == {"list", "leaf"}:
        short, leaf = (a, b) if a.kind == "list" else (b, a)
        return len(short.parts) == 1 and _same(short.parts[0], leaf)
    if {a.kind, b.kind} == {"list", "()"}:
        equations, pair = (a, b) if a.kind == "list" else (b, a)
        return all(map(_is_named, equations.parts)) and _in_order(
            [_value_of(part) for part in equations.parts], pair.parts
        )
    if a.kind != b.kind:
        return False
    if a.kind in ("list", "union"):
        return _in_any_order(_unnamed(a, b), _unnamed(b, a))
    return _in_order(a.parts, b.parts)


def _in_order(a: Sequence[_Node], b: Sequence[_Node]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _in_any_order(a: Sequence[_Node], b: Sequence[_Node]) -> bool:
    rest = list(b)
    for part in a:
        match = next((index for index, candidate in enumerate(rest) if _same(part, candidate)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _same_leaves(a: _Node, b: _Node) -> bool:
    first, second = a.quantity, b.quantity
    if not first.compatible(second):
        return False
    if _same_text(first.value, second.value) and first.power == second.power:
        return True
    printed = has_printed_float(a.tokens) or has_printed_float(b.tokens)
    signless = ["".join(value.value.split()).removeprefix("+") for value in (first, second)]
    if any(value in _INFINITE for value in signless):
        return signless[0] == signless[1]
    left, right = a.number, b.number
    if "deg" in (first.unit, second.unit) and first.unit != second.unit and equal(a.angle, b.angle, printed=printed):
        return True
    return any(
        equal(_scaled(left, factor), _scaled(right, other_factor), printed=printed)
        for factor, other_factor in first.factors(second)
    )


def _scaled(values: Sequence[Value | None], factor: Fraction) -> list[Value | None]:
    return list(values) if factor == 1 else [None if value is None else value * factor for value in values]


def _same_relations(a: _Node, b: _Node) -> bool:
    intervals = [_intervals(node) for node in (a, b)]
    if all(intervals) and _bound_name(a) == _bound_name(b):
        return _in_any_order(intervals[0], intervals[1])
    for variant in (b, _turned(b)):
        if variant.signs == a.signs and _in_order(a.parts, variant.parts):
            return True
    leaves = all(part.kind == "leaf" for relation in (a, b) for part in relation.parts)
    if len(a.signs) > 1 or len(b.signs) > 1 or not leaves:
        return False
    (first, second), (third, fourth) = a.parts, b.parts
    sign = a.signs[0]
    factor = ratio(difference(first.number, second.number), difference(third.number, fourth.number))
    if factor is None:
        return False
    if sign in _TURNED:
        if isinstance(factor, Fraction):
            return b.signs[0] == (sign if factor > 0 else _TURNED[sign])
        return False
    return sign == b.signs[0]


def _turned(relation: _Node) -> _Node:
    signs = tuple(_TURNED.get(sign, sign) for sign in reversed(relation.signs))
    return _Node("relation", relation.parts[::-1], signs=signs)


def _intervals(node: _Node) -> list[_Node]:
    """Return the intervals that a node stands for: itself, those of a union, or those of
    inequalities in a named value; empty if it stands for none.
    """
    if node.kind in ("()", "[]", "(]", "[)"):
        return [node] if len(node.parts) == 2 else []
    if node.kind in ("union", "list"):
        interval_lists = [_intervals(part) for part in node.parts]
        if node.kind == "list" and not all(part.kind == "relation" for part in node.parts):
            return []
        return [interval for part in interval_lists for interval in part] if all(interval_lists) else []
    low, high = _Node("leaf", tokens=("-", r"\infty")), _Node("leaf", tokens=(r"\infty",))
    if node.kind == "relation" and node.signs == (r"\neq",) and _is_name(node.parts[0].tokens):
        return [_Node("()", (low, node.parts[1])), _Node("()", (node.parts[1], high))]
    if node.kind != "relation" or not set(node.signs) <= set(_TURNED):
        return []
    if node.signs[0] in (">", r"\geq"):
        node = _turned(node)
    if not set(node.signs) <= {"<", r"\leq"}:
        return []
    if len(node.parts) == 3 and _is_name(node.parts[1].tokens):
        opens, closes = ("(" if node.signs[0] == "<" else "["), (")" if node.signs[1] == "<" else "]")
        return [_Node(opens + closes, (node.parts[0], node.parts[2]))]
    if len(node.parts) == 2 and _is_name(node.parts[0].tokens):
        return [_Node("(" + (")" if node.signs[0] == "<" else "]"), (low, node.parts[1]))]
    if len(node.parts) == 2 and _is_name(node.parts[1].tokens):
        return [_Node(("(" if node.signs[0] == "<" else "[") + ")", (node.parts[0], high))]
    return []


def _bound_name(relation: _Node) -> str:
    return next((part.text for part in relation.parts if _is_name(part.tokens)), "")


def _is_name(parts: Sequence[str]) -> bool:
    """Return whether tokens name a value, such as x, f(x), AB, a_{10} or \\angle ABC."""
    symbol = "".join(map(str.strip, parts))
    return bool(
        _NAME.fullmatch(symbol) or _BOUND_NAMES.fullmatch(symbol) or _TOTAL.fullmatch(symbol)
    ) and symbol not in ("e", "i", r"\pi", "pi")


def _is_named(node: _Node) -> bool:
    return node.kind == "relation" and set(node.signs) <= {"=", r"\approx"} and _value_of(node) is not node


def _value_of(node: _Node) -> _Node:
    """Return the value that an equation gives to a name; the node itself if it gives none.

    A calculation in steps, such as S = 1 + 2 = 3, gives its last value if all of its sides are
    equal.
    """
    if node.kind != "relation" or not set(node.signs) <= {"=", r"\approx"}:
        return node
    sides = list(node.parts)
    if _is_name(sides[0].tokens):
        sides = sides[1:]
    elif _is_name(sides[-1].tokens):
        sides = sides[:-1]
    return sides[-1] if all(_same(side, sides[-1]) for side in sides[:-1]) else node


def _without_names(a: _Node, b: _Node) -> _Node:
    """Return the value of `a` if `a` is an equation and `b` is not a relation; otherwise `a`."""
    return _value_of(a) if a.kind == "relation" and b.kind != "relation" else a


def _unnamed(a: _Node, b: _Node) -> Sequence[_Node]:
    if all(map(_is_named, a.parts)) and not any(part.kind == "relation" for part in b.parts):
        return [_value_of(part) for part in a.parts]
    return a.parts
