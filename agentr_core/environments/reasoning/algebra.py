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
    MAX_NUM_CHARACTERS,
    FormulaError,
    Value,
    comparison_text,
    constant_ratio,
    differences,
    evaluate,
    has_printed_float,
    is_equal,
    normalise_notation,
    tokenise,
)

# Units at the end of an answer in mathematics, such as cm, percent or dollars.

_ALIASES_BY_UNIT = {
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
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "K": "kelvin",
    "mol": "mole",
    "rad": "radian",
    "cent": "",
    "dollar": "buck USD usd",
    "euro": "EUR",
    "unit": "",
    "am": "",
    "pm": "",
}
_UNIT_BY_ALIAS = {alias: unit for unit, aliases in _ALIASES_BY_UNIT.items() for alias in (unit, *aliases.split())}
_POWER_BY_WORD = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_EXPONENT_BY_WORD = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ANY_UNIT = "unit"
_NO_UNITS = frozenset(
    {"pi", "and", "or", "mod", "base", "if", "for", "is", "sin", "cos", "tan", "ln", "log", "exp", "sqrt"}
)
_WORD = r"[A-Za-z]+"
_LAST_WORD = re.compile(rf"(?P<word>{_WORD})\s*(?P<power>\^\s*(?:\{{\s*)?(?P<exponent>-?[123])(?:\s*\}})?)?\s*$")

_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_UNIT_BEFORE_SLASH = re.compile(rf"\s{_WORD}(?:\s*\^\s*\{{?\s*\d\s*\}}?)?\s*/\s*$")


@dataclass(frozen=True)
class Quantity:
    """The text of a value and its unit, which is empty if it has none."""

    value: str
    unit: str = ""
    power: int = 0
    """The power of ten by which a word such as million multiplies the value."""

    def is_compatible(self, b: Quantity) -> bool:
        """Return whether the units do not contradict each other: equal, or missing on one side, for
        example.
        """
        units = {self.unit, b.unit}
        if len(units) == 1 or "" in units or any(unit.partition("^")[0] == _ANY_UNIT for unit in units):
            return True
        return "deg" in units and all(unit.startswith("deg") for unit in units)

    @property
    def may_be_formula(self) -> bool:
        """Whether the unit may also be a variable: `2 h` is two hours, or twice `h`."""
        return len(self.unit.partition("^")[0]) == 1 and self.unit != "%"

    def factors(self, b: Quantity) -> Iterator[tuple[Fraction, Fraction]]:
        """Yield pairs of factors for the two values; they are the same if one pair makes them
        equal. For 50%, both 50 and 0.5 are tried.
        """
        scale, other_scale = Fraction(10) ** self.power, Fraction(10) ** b.power
        yield scale, other_scale
        if (self.unit == "%") != (b.unit == "%"):
            yield (scale / 100, other_scale) if self.unit == "%" else (scale, other_scale / 100)


def parse_quantity(text: str) -> Quantity:
    """Return the value and the unit of an answer in the notation of `formulas.plain`."""
    text = text.strip()
    if text.endswith("%"):
        return Quantity(text[:-1].strip(), "%")
    if match := re.fullmatch(r"(.*\S)\s*\\deg\s*([CFK]?)", text):
        return Quantity(match[1], f"deg{match[2]}")
    unit, value_text = _split_unit(text)
    power = 0
    while (
        times := re.fullmatch(rf"(.*[\d)}}])\s*({'|'.join(_EXPONENT_BY_WORD)})s?", value_text, re.IGNORECASE)
    ) is not None:
        value_text, power = times[1], power + _EXPONENT_BY_WORD[times[2].lower()]
    return Quantity(value_text, unit, power)


def _split_unit(text: str) -> tuple[str, str]:
    """Return the unit at the end of a text in normal form, and the text before it; an empty unit
    and the whole text if there is none.
    """
    value_text = text
    words: list[str] = []
    while (match := _LAST_WORD.search(value_text)) is not None:
        before = value_text[: match.start()]
        word = match["word"]
        if not _is_unit(word, before) or before.rstrip().endswith(("\\", "_", "^")):
            break
        words.insert(0, _normal_unit(word) + (f"^{match['exponent']}" if match["power"] else ""))
        value_text = before.rstrip()
        if value_text.endswith("/"):
            words.insert(0, "/")
            value_text = value_text[:-1].rstrip()
    if "of" in words:
        # Of 20 cups of feed, the unit is cups.
        del words[words.index("of") :]
    if not words or not re.search(r"\d|\\pi|\\sqrt|\\frac", value_text) or words[0] == "/":
        return "", text
    # Square feet is ft^2, miles per hour is mi/h.
    unit: list[str] = []
    power = 0
    for word in words:
        if word in _POWER_BY_WORD and word.endswith("d") and unit:
            unit[-1] = f"{unit[-1]}^{_POWER_BY_WORD[word]}"
        elif word in _POWER_BY_WORD:
            power = _POWER_BY_WORD[word]
        elif word in ("per", "/"):
            unit.append("/")
        else:
            unit.append(f"{word}^{power}" if power else word)
            power = 0
    return {"mi/h": "mph", "km/h": "kph"}.get("".join(unit), " ".join(unit).replace(" / ", "/")), value_text


def _is_unit(word: str, before: str) -> bool:
    if word in _NO_UNITS or word.lower().removesuffix("s") in _EXPONENT_BY_WORD or before.endswith("\\"):
        return False
    if not before or re.search(r"(?:[-+*=<>(,]|\\(?:times|pm|mp|leq|geq|neq|approx|in))\s*$", before):
        return False
    is_unit_word = (
        word in _UNIT_BY_ALIAS
        or word.removesuffix("s") in _UNIT_BY_ALIAS
        or word.lower() in (*_POWER_BY_WORD, "per", "of")
    )
    is_spaced = before[-1:].isspace() or before.endswith("/")
    if len(word) == 1:
        # The h is a letter of a formula in 2 r h, and an hour in 2 m/h.
        return is_unit_word and is_spaced and not _LETTER.search(_UNIT_BEFORE_SLASH.sub("", before))
    return is_unit_word or (len(word) > 2 and is_spaced and word[1:].islower())


def _normal_unit(word: str) -> str:
    for form in (word, word.lower()):
        for name in (form, form.removesuffix("s"), form.removesuffix("es")):
            if name in _UNIT_BY_ALIAS:
                return _UNIT_BY_ALIAS[name]
    return word.lower().removesuffix("s")


_MAX_NUM_PARTS = 40
_OPENING, _CLOSING = ("(", "[", "{", r"\{", r"\langle", r"\begin"), (")", "]", "}", r"\}", r"\rangle", r"\end")
_REVERSED_RELATION = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_RELATIONS = ("=", r"\neq", r"\approx", *_REVERSED_RELATION)
_GROUPED_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_LABELLED_CHOICE = re.compile(r"(?:\(([A-J])\)\s*|([A-J])\s?[):]\s+)(\S.*)")
_LOGARITHM = re.compile(r"\\?(?<![A-Za-z])log(?![A-Za-z]|\s*_)")
_MATRIX = re.compile(
    r"\s*\\begin\s*\{\s*([bpvBV]?(?:small)?matrix|array)\s*\}(?:\s*\{[lcr|\s]*\})?(.*)\\end\s*\{\s*\1\s*\}\s*"
)
_NAME = re.compile(
    r"(?:m?\\(?:angle|triangle|overline|overarc|widehat|vec)\{?)?(?:(?:\\(?!times|infty|pi(?![a-z]))[a-z]+|[A-Za-z])(?:_(?:\w|\{[^{}]*\}))?'*){1,3}\}?"
    r"(?:\((?:[A-Za-z0-9,]|\\[a-z]+)*\))?|[A-Z][a-z]{2,}"
    r"|\\frac\{d[a-z]\}\{d[a-z]\}"
)
_BOUND_NAMES = re.compile(r"(?:\(|\\\{)(?:[A-Za-z](?:_(?:\w|\{\w+\}))?,?)+(?:\)|\\\})|\|[A-Za-z]{1,2}\||\[[A-Z]{3,}\]")
_SUM_OF_NAMES = re.compile(r"[a-z](?:\+[a-z])+")
_INFINITY_TEXTS = ("\\infty", "+\\infty", "-\\infty")


def is_same_value(a: str, b: str) -> bool:
    """Return whether two answers mean the same; an empty answer equals none.

    Formulas with letters are compared by their values at several points. What cannot be parsed is
    compared as text, without spaces and the case of words.
    """
    if not a.strip() or not b.strip():
        return False
    if a.split() == b.split():
        return True
    if max(len(a), len(b)) > 4 * MAX_NUM_CHARACTERS:
        return False
    for first, second in product(_interpretations(normalise_notation(a)), _interpretations(normalise_notation(b))):
        if _is_same_text(first, second):
            return True
        with suppress(FormulaError, RecursionError):
            if _is_same_node(_parse_node(tokenise(first)), _parse_node(tokenise(second))):
                return True
    return False


def _is_same_text(a: str, b: str) -> bool:
    return bool(comparison_text(a)) and comparison_text(a) == comparison_text(b)


def _interpretations(text: str) -> Iterator[str]:
    """Yield the possible meanings of a text: 1,234 is a number or a list of two, log is to the base
    e or 10, and (A) 5 is the choice A or its value.
    """
    yield text
    ungrouped_text = _GROUPED_NUMBER.sub(lambda match: _without_commas(match, text), text)
    if ungrouped_text != text:
        yield ungrouped_text
    if (decimal := _LOGARITHM.sub(r"\\lg ", text)) != text:
        yield decimal
    if choice := _LABELLED_CHOICE.fullmatch(text):
        yield from filter(None, choice.groups())


def _without_commas(match: re.Match[str], text: str) -> str:
    """Return a grouped number without its commas; unchanged within brackets, where it may be
    several elements of a tuple or set.
    """
    before = text[: match.start()]
    num_open = sum(before.count(sign) for sign in "([") + before.count(r"\{") - sum(before.count(sign) for sign in ")]")
    return match[0] if num_open - before.count(r"\}") > 0 else match[0].replace(",", "")


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
        return comparison_text("".join(self.tokens))

    @cached_property
    def quantity(self) -> Quantity:
        return parse_quantity("".join(self.tokens))

    @cached_property
    def point_values(self) -> list[Value | None]:
        """The values of the formula at each point, without its unit. Raises `Unreadable`."""
        return evaluate(tokenise(self.quantity.value))

    @property
    def radian_values(self) -> list[Value | None]:
        """The values at each point, with degrees as radians. Raises `Unreadable`."""
        return evaluate(self.tokens) if self.quantity.unit == "deg" else self.point_values


def _parse_node(tokens: Sequence[str]) -> _Node:
    elements = _parse_elements(tokens)
    return elements[0] if len(elements) == 1 else _Node("list", elements, tuple(tokens))


def _parse_elements(tokens: Sequence[str]) -> tuple[_Node, ...]:
    r"""Return the nodes between commas; one with \pm or \mp becomes two. Raises `Unreadable`."""
    nodes: list[_Node] = []
    for group in _split_tokens(tokens, (",", r"\cr")):
        if group[:1] != [r"\{"] and (r"\pm" in group or r"\mp" in group):
            for upper_sign, lower_sign in (("+", "-"), ("-", "+")):
                nodes.append(
                    _parse_element([{r"\pm": upper_sign, r"\mp": lower_sign}.get(token, token) for token in group])
                )
        elif group:
            nodes.append(_parse_element(group))
    return tuple(nodes)


def _parse_element(tokens: Sequence[str]) -> _Node:
    """Return the node of the tokens between two commas. Raises `Unreadable`."""
    if matrix := _parse_matrix(tokens):
        return matrix
    union = _split_tokens(tokens, (r"\cup",))
    if len(union) > 1:
        return _Node("union", tuple(map(_parse_element, union)), tuple(tokens))
    member = _split_tokens(tokens, (r"\in",))
    if len(member) == 2 and _is_name(member[0]):
        return _parse_element(member[1])
    operands = _split_tokens(tokens, _RELATIONS)
    if len(operands) > 1:
        signs, depth = [], 0
        for token in tokens:
            depth += (token in _OPENING) - (token in _CLOSING)
            if token in _RELATIONS and not depth:
                signs.append(token)
        return _Node("relation", tuple(map(_parse_element, operands)), tuple(tokens), tuple(signs))
    ratio_parts = _split_tokens(tokens, (":",))
    if len(ratio_parts) > 1 and "|" not in tokens:
        return _Node("ratio", tuple(map(_parse_element, ratio_parts)), tuple(tokens))
    return _parse_brackets(tokens) or _Node("leaf", tokens=tuple(tokens))


def _parse_brackets(tokens: Sequence[str]) -> _Node | None:
    if len(tokens) < 2 or tokens[0] not in _OPENING or tokens[-1] not in _CLOSING or r"\begin" in tokens[:1]:
        return None
    try:
        inner = _split_tokens(tokens[1:-1], (",",))
    except FormulaError:
        return None
    opening, closing = tokens[0], tokens[-1]
    if opening == r"\{" or (opening == "{" and len(inner) > 1):
        set_parts = _split_tokens(tokens[1:-1], ("|", ":"))
        if len(set_parts) == 2 and _is_name(set_parts[0]):
            return _parse_element(set_parts[1])
        return _Node("list", _parse_elements(tokens[1:-1]), tuple(tokens))
    if len(inner) == 1:
        # Brackets around one value do not matter.
        is_pair = {"(": ")", "[": "]", "{": "}"}.get(opening) == closing
        return _parse_element(inner[0]) if is_pair and not _is_formula_in_brackets(tokens) else None
    if opening == "[" and all(row[0] == "[" and row[-1] == "]" for row in inner if row):
        rows = [_split_tokens(row[1:-1], (",",)) for row in inner]
        return _Node("matrix", tuple(_Node("()", tuple(map(_parse_element, row))) for row in rows), tuple(tokens))
    if (opening, closing) == ("[", "]") and len(inner) != 2:
        return _Node("list", tuple(map(_parse_element, inner)), tuple(tokens))
    if opening in "([" and closing in ")]" and (opening + closing in ("()", "[]") or len(inner) == 2):
        return _Node(opening + closing, tuple(map(_parse_element, inner)), tuple(tokens))
    if opening == r"\langle":
        return _Node("()", tuple(map(_parse_element, inner)), tuple(tokens))
    return None


def _is_formula_in_brackets(tokens: Sequence[str]) -> bool:
    """Return whether the first and the last bracket do not belong together, as in (x+1)(x-1)."""
    depth = 0
    for token in tokens[:-1]:
        depth += (token in _OPENING) - (token in _CLOSING)
        if not depth:
            return True
    return False


def _parse_matrix(tokens: Sequence[str]) -> _Node | None:
    if tokens[:1] in (["("], ["["]) and r"\begin" in tokens[1:3] and tokens[-1] in (")", "]"):
        tokens = tokens[1:-1]
    match = _MATRIX.fullmatch("".join(tokens)) if tokens[:1] == [r"\begin"] else None
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row for row in _split_tokens(tokenise(match[2]), (r"\cr",)) if row]
    kind = "determinant" if match[1][0] in "vV" else "matrix"
    return _Node(
        kind, tuple(_Node("()", tuple(map(_parse_element, _split_tokens(row, ("&",))))) for row in rows), tuple(tokens)
    )


def _split_tokens(tokens: Sequence[str], signs: Sequence[str]) -> list[list[str]]:
    """Return the groups of tokens between the given signs, outside brackets. Raises `Unreadable` if
    brackets do not match, or there are too many groups.
    """
    groups: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            raise FormulaError
        if token in signs and not depth:
            groups.append([])
        else:
            groups[-1].append(token)
    if depth or len(groups) > _MAX_NUM_PARTS:
        raise FormulaError
    return groups


def _is_same_node(a: _Node, b: _Node) -> bool:
    if a.text and a.text == b.text:
        return True
    a, b = _without_name(a, b), _without_name(b, a)
    if a.kind == b.kind == "relation":
        return _is_same_relation(a, b)
    if a.kind == b.kind == "leaf":
        return _is_same_leaf(a, b)
    intervals = [_intervals(node) for node in (a, b)]
    if all(intervals) and any(node.kind in ("relation", "union", "list") for node in (a, b)):
        return _is_same_multiset(intervals[0], intervals[1])
    if {a.kind, b.kind} == {"list", "leaf"}:
        short, leaf = (a, b) if a.kind == "list" else (b, a)
        return len(short.parts) == 1 and _is_same_node(short.parts[0], leaf)
    if {a.kind, b.kind} == {"list", "()"}:
        equations, pair = (a, b) if a.kind == "list" else (b, a)
        return all(map(_is_named, equations.parts)) and _is_same_sequence(
            [_value_of(part) for part in equations.parts], pair.parts
        )
    if a.kind != b.kind:
        return False
    if a.kind in ("list", "union"):
        return _is_same_multiset(_parts_without_names(a, b), _parts_without_names(b, a))
    return _is_same_sequence(a.parts, b.parts)


def _is_same_sequence(a: Sequence[_Node], b: Sequence[_Node]) -> bool:
    return len(a) == len(b) and all(map(_is_same_node, a, b))


def _is_same_multiset(a: Sequence[_Node], b: Sequence[_Node]) -> bool:
    unmatched = list(b)
    for part in a:
        match = next((index for index, candidate in enumerate(unmatched) if _is_same_node(part, candidate)), None)
        if match is None:
            return False
        del unmatched[match]
    return not unmatched


def _is_same_leaf(a: _Node, b: _Node) -> bool:
    first, second = a.quantity, b.quantity
    is_printed = has_printed_float(a.tokens) or has_printed_float(b.tokens)
    if first.may_be_formula or second.may_be_formula:
        # A unit that is written out, such as hours, is no formula.
        with suppress(FormulaError):
            if is_equal(evaluate(a.tokens), evaluate(b.tokens), printed=is_printed):
                return True
    if not first.is_compatible(second):
        return False
    if _is_same_text(first.value, second.value) and first.power == second.power:
        return True
    unsigned_values = ["".join(value.value.split()).removeprefix("+") for value in (first, second)]
    if any(value in _INFINITY_TEXTS for value in unsigned_values):
        return unsigned_values[0] == unsigned_values[1]
    left, right = a.point_values, b.point_values
    if (
        "deg" in (first.unit, second.unit)
        and first.unit != second.unit
        and is_equal(a.radian_values, b.radian_values, printed=is_printed)
    ):
        return True
    return any(
        is_equal(_scaled(left, factor), _scaled(right, other_factor), printed=is_printed)
        for factor, other_factor in first.factors(second)
    )


def _scaled(values: Sequence[Value | None], factor: Fraction) -> list[Value | None]:
    return list(values) if factor == 1 else [None if value is None else value * factor for value in values]


def _is_same_relation(a: _Node, b: _Node) -> bool:
    intervals = [_intervals(node) for node in (a, b)]
    if all(intervals) and _bound_name(a) == _bound_name(b):
        return _is_same_multiset(intervals[0], intervals[1])
    for variant in (b, _reversed_relation(b)):
        if variant.signs == a.signs and _is_same_sequence(a.parts, variant.parts):
            return True
    has_only_leaves = all(part.kind == "leaf" for relation in (a, b) for part in relation.parts)
    if len(a.signs) > 1 or len(b.signs) > 1 or not has_only_leaves:
        return False
    (first, second), (third, fourth) = a.parts, b.parts
    sign = a.signs[0]
    factor = constant_ratio(
        differences(first.point_values, second.point_values), differences(third.point_values, fourth.point_values)
    )
    if factor is None:
        return False
    if sign in _REVERSED_RELATION:
        if isinstance(factor, Fraction):
            return b.signs[0] == (sign if factor > 0 else _REVERSED_RELATION[sign])
        return False
    return sign == b.signs[0]


def _reversed_relation(relation: _Node) -> _Node:
    signs = tuple(_REVERSED_RELATION.get(sign, sign) for sign in reversed(relation.signs))
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
    if node.kind != "relation" or not set(node.signs) <= set(_REVERSED_RELATION):
        return []
    if node.signs[0] in (">", r"\geq"):
        node = _reversed_relation(node)
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


def _is_name(tokens: Sequence[str]) -> bool:
    """Return whether tokens name a value, such as x, f(x), AB, a_{10} or \\angle ABC."""
    symbol = "".join(map(str.strip, tokens))
    return bool(
        _NAME.fullmatch(symbol) or _BOUND_NAMES.fullmatch(symbol) or _SUM_OF_NAMES.fullmatch(symbol)
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
    return sides[-1] if all(_is_same_node(side, sides[-1]) for side in sides[:-1]) else node


def _without_name(a: _Node, b: _Node) -> _Node:
    """Return the value of `a` if `a` is an equation and `b` is not a relation; otherwise `a`."""
    return _value_of(a) if a.kind == "relation" and b.kind != "relation" else a


def _parts_without_names(a: _Node, b: _Node) -> Sequence[_Node]:
    if all(map(_is_named, a.parts)) and not any(part.kind == "relation" for part in b.parts):
        return [_value_of(part) for part in a.parts]
    return a.parts
