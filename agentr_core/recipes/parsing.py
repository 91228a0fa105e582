"""From YAML and overrides to a recipe; all faults are reported together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from agentr_core.errors import ConfigError
from agentr_core.recipes.environments import RANGE
from agentr_core.recipes.models import map_texts
from agentr_core.recipes.recipe import ADAPTER, SINGLE_WORLD_SECTIONS, Recipe, resolved, secrets_in
from agentr_core.system import data_path, shipped_recipes
from agentr_core.texts import (
    did_you_mean,
    escape_invisible,
    faults_message,
    lone_surrogate,
    path_for_message,
    unreadable_reason,
)

# What Pydantic found wrong with a value, in the words of those who write recipes.

_EXPECTED = {
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


def value_fault(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return one phrase for all errors of one value. Pydantic reports an error for each kind that
    the value may have, if it has none of them.
    """
    kinds = list(dict.fromkeys(kind for error in errors for kind in _accepted_values(error)))
    choice = " or ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))
    details = [_plain_fault(error) for error in errors if not _accepted_values(error)]
    return " or ".join(dict.fromkeys([*([f"give {choice}"] if kinds else []), *details]))


def quoted_value(value: Any) -> str:
    """Return a wrong value as a recipe would have it, cut to a length that fits into a message."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _accepted_values(error: Mapping[str, Any]) -> Sequence[str]:
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("bool_parsing", "bool_type"):
        return ("true", "false")
    if kind == "literal_error":
        return re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
    if kind == "string_pattern_mismatch":
        return (_PATTERNS.get(context["pattern"], f"a text that matches {context['pattern']}"),)
    return (_EXPECTED[kind].format_map(context),) if kind in _EXPECTED else ()


def _plain_fault(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "a value is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"there is no field {error['loc'][-1]}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


# YAML from a user, read so that nothing is lost silently and nothing takes forever.

MAX_VALUES = 100_000
"""The most values in a document once its aliases are written out."""
MAX_DIGITS = 1_000
"""The most digits of a number: Python refuses to print several thousand, even in an error message.
"""
MAX_INTEGER = 2**63 - 1
"""The largest whole number: seeds and counts are stored in 64 bits."""
_INTEGER = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_OCTAL_YAML_1_2 = re.compile(r"[-+]?0o[0-7]+")
"""An octal number of YAML 1.2, and of Python; YAML 1.1, which is read here, takes it for a text."""
_QUOTED_CHARS = 40
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
        position = f"line {text[: error.position].count(chr(10)) + 1}"
        raise ConfigError(f"{_yaml_fault(error)} ({escape_invisible(text[error.position])}), on {position}") from None
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _count_values(root, loader, {}) > MAX_VALUES:
            raise ConfigError(f"it contains more than {MAX_VALUES:,} values once its aliases are written out")
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_fault(error)) from None
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:
        # Such as a date that does not exist.
        raise ConfigError(f"a value in it cannot be read ({error})") from None
    finally:
        loader.dispose()


def yaml_quoted(text: str) -> str:
    """Return a text as YAML, in quotes on one line.

    JSON would not do: YAML does not join the halves into which its escapes take an emoji.
    """
    document: str = yaml.safe_dump(text, default_style='"', width=math.inf)
    return document.rstrip("\n")


def unstorable_faults(value: Any, path: str = "") -> list[str]:
    """Return one phrase for each part of a value, named by its path, that a run could not store or
    pass on: half a surrogate pair, as escapes may give, a zero character, a number that is not
    finite, a date or another kind that JSON does not know.
    """
    if isinstance(value, Mapping):
        faults = [f"{path or 'a name'}: {fault}" for key in value if (fault := _unfit_reason(key))]
        inner = [(f"{path}.{key}" if path else str(key), part) for key, part in value.items()]
        return faults + [fault for name, part in inner for fault in unstorable_faults(part, name)]
    if _is_list(value):
        return [fault for number, part in enumerate(value) for fault in unstorable_faults(part, f"{path}.{number}")]
    fault = _unfit_reason(value)
    return [f"{path}: {fault}" if path else fault] if fault else []


def _unfit_reason(value: Any) -> str | None:
    if isinstance(value, str):
        if lone_surrogate(value) is not None:
            return f"{escape_invisible(value)[:_QUOTED_CHARS]} has half of a surrogate pair; write the character itself"
        return (
            f"{escape_invisible(value)[:_QUOTED_CHARS]} has a zero character; leave it out" if "\0" in value else None
        )
    if isinstance(value, float) and not math.isfinite(value):
        return f"give a finite number, not {value}"
    if value is None or isinstance(value, bool | int | float):
        return None
    return f"a {type(value).__name__} is no value of a recipe; put it in quotes to give a text"


def type_faults(raw: Any, result: Any, path: str = "") -> list[str]:
    """Return one phrase for each value of `raw` that was parsed as another kind, in `result`.

    Booleans are not numbers, numbers are not booleans, and whole numbers fit into 64 bits.
    """
    if isinstance(raw, Mapping) and isinstance(result, Mapping):
        parsed_by_name = {str(key): value for key, value in result.items()}
        pairs = [
            (str(key), value, parsed_by_name[str(key)]) for key, value in raw.items() if str(key) in parsed_by_name
        ]
    elif _is_list(raw) and _is_list(result) and len(raw) == len(result):
        pairs = [(str(number), *values) for number, values in enumerate(zip(raw, result, strict=True))]
    else:
        fault = ""
        if isinstance(raw, bool) and _is_number(result):
            fault = f"give a number, not {str(raw).lower()}"
        elif _is_number(raw) and isinstance(result, bool):
            fault = f"give true or false, not {raw}"
        elif isinstance(raw, int) and abs(raw) > MAX_INTEGER:
            fault = f"give a number of at most {MAX_INTEGER}, which fits into 64 bits"
        return [f"{path}: {fault}"] if fault else []
    return [
        fault
        for name, value, parsed_value in pairs
        for fault in type_faults(value, parsed_value, f"{path}.{name}" if path else name)
    ]


def _yaml_fault(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, without the surrounding text, which may contain a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "a character that YAML does not allow"
    return f"{problem}, on line {mark.line + 1}" if mark else str(problem)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _count_values(node: yaml.Node, loader: yaml.SafeLoader, sizes: dict[int, int]) -> int:
    """Return how many values a node contains; `sizes` has the counts of known nodes, 0 while one is
    being counted.
    """
    count = sizes.get(id(node))
    if count == 0:
        raise ConfigError(f"the value of line {node.start_mark.line + 1} contains itself through an alias")
    if count is not None:
        return count
    if isinstance(node, yaml.ScalarNode):
        # YAML 1.1 takes some numbers for others than a person reads: `010` for 8, `1:30` for 90,
        # `0o10` for a text.
        text, location = node.value, f"on line {node.start_mark.line + 1}"
        excerpt = text if len(text) <= _QUOTED_CHARS else f"{text[:_QUOTED_CHARS]}..."
        if node.tag in (_INTEGER, _FLOAT) and len(text) > MAX_DIGITS:
            raise ConfigError(f"the number {location} has {len(text):,} digits")
        if node.tag in (_INTEGER, _FLOAT) and ":" in text:
            raise ConfigError(f"{excerpt} {location} is a number to base 60 in YAML; write it out, or put it in quotes")
        if node.tag == _INTEGER and _OCTAL.fullmatch(text):
            raise ConfigError(
                f"{excerpt} {location} is to base 8 in YAML; write it without the first 0, or put it in quotes"
            )
        if node.tag == _TEXT and node.style is None and _OCTAL_YAML_1_2.fullmatch(text):
            raise ConfigError(
                f"{excerpt} {location} is a text in YAML 1.1; write the number to base 10, or put it in quotes"
            )
    sizes[id(node)] = 0
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        # YAML's own loader would drop the first of two equal keys.
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name = loader.construct_object(key)
            line = key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{key.value} is there twice, on lines {lines[name]} and {line}; leave one out")
            lines[name] = line
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    sizes[id(node)] = 1 + sum(_count_values(part, loader, sizes) for part in parts)
    return sizes[id(node)]


Check = Callable[[Any, Recipe | None], list[str]]
"""Returns what is wrong with the method of a recipe, given as it is named, and with the recipe as a
whole, one sentence each; None stands for a recipe whose fields have faults already. The methods
have it (`methods.faults`), which are a layer above recipes."""
_PYDANTIC_KIND = re.compile(r"(constrained|function|literal|tuple|list|dict|lax|json)[-\[].*|str|int|float|bool")


def load(path: Path, overrides: Sequence[str] = (), *, check: Check, workspace: str = "") -> Recipe:
    """Return the recipe in a YAML file with `a.b=value` overrides applied.

    A name without a file stands for the shipped recipe of that name. The data that it names by
    `data/...` is the shipped data, unless the current folder has the same.

    Args:
        workspace: that of a recipe that names none; empty: the usual one.

    Raises:
        ConfigError: the file is missing or not YAML, or fields are unknown, ill-typed or out of
            range; the message lists every fault.
    """
    recipes = {} if path.exists() else shipped_recipes()
    try:
        data = read_yaml(recipes.get(str(path), path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = [sibling.name for sibling in path.parent.glob("*.y*ml")] if path.suffix else list(recipes)
        suggestion = did_you_mean(path.name, names)
        raise ConfigError(
            f"recipe {path_for_message(path)} does not exist{suggestion}; `agentr recipes` lists the shipped ones"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"recipe {path_for_message(path)} is a folder; name a YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {unreadable_reason(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        problem = "is empty" if data is None else "is a list" if isinstance(data, list) else "is a single value"
        raise ConfigError(f"recipe {path} {problem}; give fields, a line each, such as `name: my-recipe`")
    if str(path) in recipes:

        def with_data_path(_: tuple[str, ...], text: str) -> str:
            folder, *parts = Path(text).parts or ("",)
            return str(data_path(*parts)) if folder == "data" and parts and not Path(text).exists() else text

        data = map_texts(data, with_data_path)
    return parse({"workspace": workspace, **data} if workspace else data, overrides, check=check, source=str(path))


def parse(
    data: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    check: Check,
    source: str = "recipe",
    stored: bool = False,
) -> Recipe:
    """Return the recipe of a mapping with overrides applied. Raises `ConfigError`, which lists
    every fault.

    With `stored`, secrets that are written out are accepted, because earlier versions stored them
    that way.
    """
    config = _plain_copy(data)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.split(".")):
            raise ConfigError(f"override {override!r} must look like section.field=value")
        try:
            # A range ends with a bracket that YAML does not accept.
            value = text if RANGE.fullmatch(text.strip()) else read_yaml(text)
        except ConfigError as error:
            raise ConfigError(f"override {key!r}: the value is not YAML: {error}") from None
        *parents, last = key.split(".")
        target = config
        for parent in parents:
            target = target.setdefault(_key_of(parent, target), {})
            if not isinstance(target, dict):
                raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        target[_key_of(last, target)] = value
    if unfit := unstorable_faults(config):
        raise ConfigError(escape_invisible(faults_message(unfit, source)))
    if "environment" in config:
        config["environment"] = with_example_defaults(config["environment"])
    if isinstance(worlds := config.get("environments"), dict):
        config["environments"] = {name: with_example_defaults(section) for name, section in worlds.items()}
    try:
        recipe = ADAPTER.validate_python(config)
    except ValidationError as error:
        faults = [*check(config.get("method"), None), *_field_faults(error.errors())]
        raise ConfigError(faults_message(faults, source)) from None
    conflicts = [section for section in SINGLE_WORLD_SECTIONS if section in config and recipe.environments]
    advice = "does not go with environments, each of which has its own; leave one of them out"
    faults = [
        *(f"{section}: {advice}" for section in conflicts),
        *type_faults(config, resolved(recipe)),
        *check(recipe.method, recipe),
        *([] if stored else secrets_in(recipe)),
    ]
    if faults:
        raise ConfigError(faults_message(faults, source))
    return recipe


MOVED_FIELDS = MappingProxyType(
    {
        "eto.dpo.max_chosen_drop": "is alarms.chosen_drop now; write `alarms: {chosen_drop: 20, reaction: back}`, with "
        "your number",
        "eto.dpo.on_collapse": "is alarms.reaction now, for all alarms of a run; write `alarms: {reaction: back}`, or "
        "stop",
    }
)
"""Fields of earlier versions: what is written in place of each. Stored recipes have them."""


def restore_recipe(data: dict[str, Any], *, source: str) -> Recipe:
    """Return the recipe of a run as it was stored. It had no faults when the run began, and those
    that only a later version knows must not hide what the run made.

    Raises `ConfigError` for a field that this version does not know, or whose value it refuses.
    """
    # Until 2026-11-28 a recipe had a section `base`, which no run with a store read.
    config = _plain_copy({name: value for name, value in data.items() if name != "base"})
    for old_field in MOVED_FIELDS:
        *parents, last = old_field.split(".")
        section: Any = config
        for parent in parents:
            section = section.get(parent, {})
        section.pop(last, None)
    try:
        return ADAPTER.validate_python(config)
    except ValidationError as error:
        raise ConfigError(faults_message(_field_faults(error.errors()), source)) from None


def _field_faults(errors: Sequence[Any]) -> list[str]:
    """Return one sentence for each wrong field."""
    by_field: dict[str, list[Any]] = {}
    for error in errors:
        # Without Pydantic's names for the kinds that the value may have.
        parts = [str(part) for part in error["loc"] if not _PYDANTIC_KIND.fullmatch(str(part))]
        field = ".".join(parts).replace(".[key]", ", as a name")
        by_field.setdefault(field, []).append(error)
    # Where a text or a list would do, a list with a wrong member is no text, either.
    inner = [field for field in by_field if not any(other.startswith(f"{field}.") for other in by_field)]
    return [f"{field}: {_field_fault(by_field[field])}" if field else _field_fault(by_field[field]) for field in inner]


def _field_fault(errors: Sequence[Any]) -> str:
    first = errors[0]
    if first["type"] == "unexpected_keyword_argument":
        path = first["loc"]
        if advice := MOVED_FIELDS.get(".".join(map(str, path))):
            return advice
        schema = _schema()
        sections = [schema]
        for part in path[:-1]:
            inner = []
            for section in sections:
                # A field, or any member of a mapping.
                of_members = [
                    *section.get("patternProperties", {}).values(),
                    section.get("additionalProperties") or {},
                ]
                inner.append(section.get("properties", {}).get(str(part)) or of_members[0])
            sections = [alternative for node in inner for alternative in _alternatives(node, schema["$defs"])]
        names = [name for section in sections for name in section.get("properties", ())]
        return f"unknown field{did_you_mean(str(path[-1]), names)}"
    # What stands there may be a secret, or hold one.
    secret = "extra_body" in first["loc"] or "api_key_env" in first["loc"]
    suffix = "" if secret or first["type"] == "missing" else f" (got {quoted_value(first['input'])})"
    return f"{value_fault(errors)}{suffix}"


@cache
def _schema() -> dict[str, Any]:
    # It takes a tenth of a second, and each fault of a recipe asks for it.
    return ADAPTER.json_schema()


def _alternatives(node: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a node of a JSON schema stands for: itself, or what it refers to."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    for alternative in node.get("anyOf", ()):
        yield from _alternatives(alternative, definitions)
    if "anyOf" not in node:
        yield node


def _key_of(name: str, section: dict[Any, Any]) -> Any:
    """Return the key that a section has for a name: YAML reads `2` as a number."""
    return next((key for key in section if str(key) == name), name)


def _plain_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_copy(item) for key, item in value.items()}
    return value


def with_example_defaults(section: Any) -> Any:
    """Return the section of a world as it stands in a recipe, with what it does not say about its
    examples: they are turns, and replies end at their first action.

    The defaults of the records are those of recipes that earlier versions stored.
    """
    prompt = section.get("prompt") if isinstance(section, dict) else None
    if not isinstance(prompt, dict) or not prompt.get("examples") or section.get("transcript") == "native":
        return section
    prompt = {"examples_as": "turns", **prompt}
    action = section.get("action", {})
    if prompt["examples_as"] == "turns" and isinstance(action, dict) and action.get("labels") != "published":
        section = {**section, "action": {"take": "first", **action}}
    return {**section, "prompt": prompt}
