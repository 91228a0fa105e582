"""What Pydantic found wrong with a value, in the words of those who write recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WANTED = {
    "dataclass_type": "a section of fields",
    "dict_type": "a section of fields",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "list_type": "a list",
    "string_too_short": "a text that is not empty",
    "string_type": 'a text ("" if empty, digits alone in quotes)',
    "too_long": "a list of at most {max_length:g}",
    "too_short": "a list of at least {min_length:g}",
    "tuple_type": "a list",
}
"""What is wanted, by the type of Pydantic's error, with the numbers that the error has in `ctx`."""
_PATTERNS = {
    r"^[a-z0-9][a-z0-9.-]*$": "small letters, digits, '.' and '-', the first a letter or a digit",
    r"^[a-z0-9][a-z0-9-]*$": "small letters, digits and '-', the first a letter or a digit",
    # What stands there may be the key itself.
    r"^([A-Z][A-Z0-9_]*)?$": "the name of an environment variable, in capitals, never what it holds",
    r"^[^\n]*$": "a text of one line",
    r"^\S+$": "a text without spaces",
}


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with one value, of which Pydantic says several things where it may be of
    several kinds and is of none.
    """
    kinds = list(dict.fromkeys(kind for error in errors for kind in _wanted(error)))
    choice = " or ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))
    others = [_said(error) for error in errors if not _wanted(error)]
    return " or ".join(dict.fromkeys([*([f"give {choice}"] if kinds else []), *others]))


def given(value: Any) -> str:
    """Return a wrong value as a recipe would have it, cut to a length that fits into a message."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wanted(error: Mapping[str, Any]) -> Sequence[str]:
    kind, about = error["type"], error.get("ctx", {})
    if kind in ("bool_parsing", "bool_type"):
        return ("true", "false")
    if kind == "literal_error":
        return re.findall(r"'([^']*)'", about["expected"]) or [about["expected"]]
    if kind == "string_pattern_mismatch":
        return (_PATTERNS.get(about["pattern"], f"a text that matches {about['pattern']}"),)
    return (_WANTED[kind].format_map(about),) if kind in _WANTED else ()


def _said(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "a value is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"there is no field {error['loc'][-1]}"
    said = error["msg"].removeprefix("Value error, ")
    return f"{said[0].lower()}{said[1:]}"
