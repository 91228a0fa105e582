"""YAML from a user, read so that nothing is lost silently and nothing takes forever."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from agentr_core.errors import ConfigError
from agentr_core.texts import lone_surrogate, visible

MOST_VALUES = 100_000
"""The most values in a document once its aliases are written out."""
MOST_DIGITS = 1_000
"""The most digits of a number: Python refuses to print several thousand, even in an error message.
"""
LARGEST = 2**63 - 1
"""The largest whole number: seeds and counts are stored in 64 bits."""
_INTEGER = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_OCTAL_OF_NEW = re.compile(r"[-+]?0o[0-7]+")
"""An octal number of YAML 1.2, and of Python; YAML 1.1, which is read here, takes it for a text."""
_SHOWN = 40
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        ConfigError: the text is not YAML, a mapping has a key twice, an alias contains itself, the
            document is nested too deeply or too large, or a number has too many digits; the message
            is only the cause.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        place = f"line {text[: error.position].count(chr(10)) + 1}"
        raise ConfigError(f"{_said(error)} ({visible(text[error.position])}), on {place}") from None
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _check(root, loader, {}) > MOST_VALUES:
            raise ConfigError(f"it contains more than {MOST_VALUES:,} values once its aliases are written out")
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(_said(error)) from None
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:
        # Such as a date that does not exist.
        raise ConfigError(f"a value in it cannot be read ({error})") from None
    finally:
        loader.dispose()


def quoted(text: str) -> str:
    """Return a text as YAML, in quotes on one line.

    JSON would not do: YAML does not join the halves into which its escapes take an emoji.
    """
    written: str = yaml.safe_dump(text, default_style='"', width=math.inf)
    return written.rstrip("\n")


def unfit_values(value: Any, where: str = "") -> list[str]:
    """Return one phrase for each part of a value, named by its path, that a run could not store or
    pass on: half a surrogate pair, as escapes may give, a zero character, a number that is not
    finite, a date or another kind that JSON does not know.
    """
    if isinstance(value, Mapping):
        faults = [f"{where or 'a name'}: {fault}" for key in value if (fault := _unfit(key))]
        inner = [(f"{where}.{key}" if where else str(key), part) for key, part in value.items()]
        return faults + [fault for name, part in inner for fault in unfit_values(part, name)]
    if _listed(value):
        return [fault for number, part in enumerate(value) for fault in unfit_values(part, f"{where}.{number}")]
    fault = _unfit(value)
    return [f"{where}: {fault}" if where else fault] if fault else []


def _unfit(value: Any) -> str | None:
    if isinstance(value, str):
        if lone_surrogate(value) is not None:
            return f"{visible(value)[:_SHOWN]} has half of a surrogate pair; write the character itself"
        return f"{visible(value)[:_SHOWN]} has a zero character; leave it out" if "\0" in value else None
    if isinstance(value, float) and not math.isfinite(value):
        return f"give a finite number, not {value}"
    if value is None or isinstance(value, bool | int | float):
        return None
    return f"a {type(value).__name__} is no value of a recipe; put it in quotes to give a text"


def faults_of_kind(given: Any, parsed: Any, where: str = "") -> list[str]:
    """Return one phrase for each value of `given` that was parsed as another kind, in `parsed`.

    Booleans are not numbers, numbers are not booleans, and whole numbers fit into 64 bits.
    """
    if isinstance(given, Mapping) and isinstance(parsed, Mapping):
        named = {str(key): value for key, value in parsed.items()}
        pairs = [(str(key), value, named[str(key)]) for key, value in given.items() if str(key) in named]
    elif _listed(given) and _listed(parsed) and len(given) == len(parsed):
        pairs = [(str(number), *both) for number, both in enumerate(zip(given, parsed, strict=True))]
    else:
        fault = _fault_of_kind(given, parsed)
        return [f"{where}: {fault}"] if fault else []
    return [
        fault
        for name, value, other in pairs
        for fault in faults_of_kind(value, other, f"{where}.{name}" if where else name)
    ]


def _fault_of_kind(given: Any, parsed: Any) -> str | None:
    if isinstance(given, bool) and _is_number(parsed):
        return f"give a number, not {str(given).lower()}"
    if _is_number(given) and isinstance(parsed, bool):
        return f"give true or false, not {given}"
    if isinstance(given, int) and abs(given) > LARGEST:
        return f"give a number of at most {LARGEST}, which fits into 64 bits"
    return None


def _said(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, without the surrounding text, which may contain a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "a character that YAML does not allow"
    return f"{problem}, on line {mark.line + 1}" if mark else str(problem)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check(node: yaml.Node, loader: yaml.SafeLoader, sizes: dict[int, int]) -> int:
    """Return how many values a node contains; `sizes` has the counts of known nodes, 0 while one is
    being counted.
    """
    known = sizes.get(id(node))
    if known == 0:
        raise ConfigError(f"the value of line {node.start_mark.line + 1} contains itself through an alias")
    if known is not None:
        return known
    if isinstance(node, yaml.ScalarNode):
        _check_number(node)
    sizes[id(node)] = 0
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, loader)
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    sizes[id(node)] = 1 + sum(_check(part, loader, sizes) for part in parts)
    return sizes[id(node)]


def _check_number(node: yaml.ScalarNode) -> None:
    """Raise `ConfigError` for a number that Python does not print, and for one that YAML 1.1 takes
    for another than a person reads: `010` for 8, `1:30` for 90, `0o10` for a text.
    """
    text, where = node.value, f"on line {node.start_mark.line + 1}"
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if node.tag in (_INTEGER, _FLOAT) and len(text) > MOST_DIGITS:
        raise ConfigError(f"the number {where} has {len(text):,} digits")
    if node.tag in (_INTEGER, _FLOAT) and ":" in text:
        raise ConfigError(f"{shown} {where} is a number to base 60 in YAML; write it out, or put it in quotes")
    if node.tag == _INTEGER and _OCTAL.fullmatch(text):
        raise ConfigError(f"{shown} {where} is to base 8 in YAML; write it without the first 0, or put it in quotes")
    if node.tag == _TEXT and node.style is None and _OCTAL_OF_NEW.fullmatch(text):
        raise ConfigError(f"{shown} {where} is a text in YAML 1.1; write the number to base 10, or put it in quotes")


def _check_keys(node: yaml.MappingNode, loader: yaml.SafeLoader) -> None:
    """Raise `ConfigError` for a key that a mapping has twice; YAML's own loader would drop the
    first.
    """
    lines: dict[Any, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        name = loader.construct_object(key)
        line = key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{key.value} is there twice, on lines {lines[name]} and {line}; leave one out")
        lines[name] = line
