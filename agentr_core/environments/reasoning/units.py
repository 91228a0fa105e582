r"""Units at the end of an answer of mathematics, such as cm, percent or dollars."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

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
class Measured:
    """A value and its unit, which is empty if it has none."""

    value: str
    unit: str = ""
    power: int = 0
    """The power of ten by which a word such as million multiplies the value."""

    def fits(self, other: Measured) -> bool:
        """Return whether the units do not contradict each other: one may be left out."""
        units = {self.unit, other.unit}
        if len(units) == 1 or "" in units or any(unit.partition("^")[0] == _ANY for unit in units):
            return True
        return "deg" in units and all(unit.startswith("deg") for unit in units)

    def factors(self, other: Measured) -> Iterator[tuple[Fraction, Fraction]]:
        """Yield the factors of both values at which they may be the same: 50% is 50 and 0.5."""
        ours, others = Fraction(10) ** self.power, Fraction(10) ** other.power
        yield ours, others
        if (self.unit == "%") != (other.unit == "%"):
            yield (ours / 100, others) if self.unit == "%" else (ours, others / 100)


def measured(text: str) -> Measured:
    """Return the value and the unit of an answer in the notation of `notation.plain`."""
    text = text.strip()
    if text.endswith("%"):
        return Measured(text[:-1].strip(), "%")
    if found := re.fullmatch(r"(.*\S)\s*\\deg\s*([CFK]?)", text):
        return Measured(found[1], f"deg{found[2]}")
    unit, rest = _unit_at_the_end(text)
    power = 0
    while (times := re.fullmatch(rf"(.*[\d)}}])\s*({'|'.join(_TIMES)})s?", rest, re.IGNORECASE)) is not None:
        rest, power = times[1], power + _TIMES[times[2].lower()]
    return Measured(rest, unit, power)


def _unit_at_the_end(text: str) -> tuple[str, str]:
    """Return the unit in normal form, and what stands before it."""
    rest = text
    words: list[str] = []
    while (found := _END.search(rest)) is not None:
        before = rest[: found.start()]
        word = found["word"]
        if not _is_unit(word, before) or before.rstrip().endswith(("\\", "_", "^")):
            break
        words.insert(0, _normal(word) + (f"^{found['exponent']}" if found["power"] else ""))
        rest = before.rstrip()
        if rest.endswith("/"):
            words.insert(0, "/")
            rest = rest[:-1].rstrip()
    if not words or not re.search(r"\d|\\pi|\\sqrt|\\frac", rest) or words[0] == "/":
        return "", text
    return _joined(words), rest


def _is_unit(word: str, before: str) -> bool:
    if word in _NO_UNITS or word.lower().removesuffix("s") in _TIMES or before.endswith("\\"):
        return False
    if not before or re.search(r"[-+*=<>(,]\s*$", before):
        return False
    known = word in _NORMAL or word.removesuffix("s") in _NORMAL or word.lower() in (*_POWERS, "per")
    spaced = before[-1:].isspace() or before.endswith("/")
    if len(word) == 1:
        # In 2 r h, the h is no hour; in 2 m/h it is.
        return known and spaced and not _LETTER.search(_OVER.sub("", before))
    return known or (len(word) > 2 and spaced and word[1:].islower())


def _normal(word: str) -> str:
    for form in (word, word.lower()):
        for name in (form, form.removesuffix("s"), form.removesuffix("es")):
            if name in _NORMAL:
                return _NORMAL[name]
    return word.lower().removesuffix("s")


def _joined(words: list[str]) -> str:
    """Return a unit of several words: square feet is ft^2, miles per hour is mi/h."""
    found: list[str] = []
    power = 0
    for word in words:
        if word in _POWERS and word.endswith("d") and found:
            found[-1] = f"{found[-1]}^{_POWERS[word]}"
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in ("per", "/"):
            found.append("/")
        else:
            found.append(f"{word}^{power}" if power else word)
            power = 0
    return {"mi/h": "mph", "km/h": "kph"}.get("".join(found), " ".join(found).replace(" / ", "/"))
