"""From YAML and overrides to a recipe; all faults are reported together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentr_core.errors import ConfigError
from agentr_core.recipes.environments import with_examples
from agentr_core.recipes.faults import secrets_in
from agentr_core.recipes.instances import RANGE
from agentr_core.recipes.recipe import ADAPTER, OF_ONE_WORLD, Recipe, resolved
from agentr_core.recipes.wrong_values import given, sentence
from agentr_core.recipes.yaml_text import faults_of_kind, read_yaml, unfit_values
from agentr_core.texts import closest, listed, placed, unreadable, visible

Check = Callable[[Any, Recipe | None], list[str]]
"""Returns what is wrong with the method of a recipe, given as it is named, and with the recipe as a
whole, one sentence each; None stands for a recipe whose fields have faults already. The methods
have it (`methods.faults`), which are a layer above recipes."""
_KIND = re.compile(r"(constrained|function|literal|tuple|list|dict|lax|json)[-\[].*|str|int|float|bool")


def load(path: Path, overrides: Sequence[str] = (), *, check: Check, workspace: str = "") -> Recipe:
    """Return the recipe in a YAML file with `a.b=value` overrides applied.

    Args:
        workspace: that of a recipe that names none; empty: the usual one.

    Raises:
        ConfigError: the file is missing or not YAML, or fields are unknown, ill-typed or out of
            range; the message lists every fault.
    """
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        meant = closest(path.name, (other.name for other in path.parent.glob("*.y*ml")))
        raise ConfigError(
            f"recipe {placed(path)} does not exist{meant}; `ls deployments/recipes` shows the shipped ones"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"recipe {placed(path)} is a folder; name a YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {unreadable(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        what = "is empty" if data is None else "is a list" if isinstance(data, list) else "is a single value"
        raise ConfigError(f"recipe {path} {what}; give fields, a line each, such as `name: my-recipe`")
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
    merged = _plain_copy(data)
    for override in overrides:
        _apply(merged, override)
    if unfit := unfit_values(merged):
        raise ConfigError(visible(listed(unfit, source)))
    if "environment" in merged:
        merged["environment"] = with_examples(merged["environment"])
    if isinstance(worlds := merged.get("environments"), dict):
        merged["environments"] = {name: with_examples(section) for name, section in worlds.items()}
    try:
        recipe = ADAPTER.validate_python(merged)
    except ValidationError as error:
        faults = [*check(merged.get("method"), None), *_told(error.errors())]
        raise ConfigError(listed(faults, source)) from None
    both = [section for section in OF_ONE_WORLD if section in merged and recipe.environments]
    either = "does not go with environments, each of which has its own; leave one of them out"
    faults = [
        *(f"{section}: {either}" for section in both),
        *faults_of_kind(merged, resolved(recipe)),
        *check(recipe.method, recipe),
        *([] if stored else secrets_in(recipe)),
    ]
    if faults:
        raise ConfigError(listed(faults, source))
    return recipe


def restored(data: dict[str, Any], *, source: str) -> Recipe:
    """Return the recipe of a run as it was stored. It had no faults when the run began, and those
    that only a later version knows must not hide what the run made.

    Raises `ConfigError` for a field that this version does not know, or whose value it refuses.
    """
    # Until 2026-11-28 a recipe had a section `base`, which no run with a store read.
    known = {name: value for name, value in data.items() if name != "base"}
    try:
        return ADAPTER.validate_python(known)
    except ValidationError as error:
        raise ConfigError(listed(_told(error.errors()), source)) from None


def _told(errors: Sequence[Any]) -> list[str]:
    """Return one sentence for each wrong field."""
    by_field: dict[str, list[Any]] = {}
    for error in errors:
        field = ".".join(_field_path(error["loc"])).replace(".[key]", ", as a name")
        by_field.setdefault(field, []).append(error)
    # Where a text or a list would do, a list with a wrong member is no text, either.
    inner = [field for field in by_field if not any(other.startswith(f"{field}.") for other in by_field)]
    return [f"{field}: {_sentence(by_field[field])}" if field else _sentence(by_field[field]) for field in inner]


def _field_path(path: Sequence[str | int]) -> list[str]:
    """Return the path of a field without Pydantic's names for the kinds that its value may have."""
    return [str(part) for part in path if not _KIND.fullmatch(str(part))]


def _sentence(errors: Sequence[Any]) -> str:
    first = errors[0]
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown field{_meant(first['loc'])}"
    return f"{sentence(errors)}{_got(first)}"


def _got(error: Any) -> str:
    # What stands there may be a secret, or hold one.
    secret = "extra_body" in error["loc"] or "api_key_env" in error["loc"]
    return "" if secret or error["type"] == "missing" else f" (got {given(error['input'])})"


def _meant(path: Sequence[str | int]) -> str:
    """Return the closest known field as a question, or nothing where none is close."""
    schema = ADAPTER.json_schema()
    sections = [schema]
    for part in path[:-1]:
        inner = [_inner(section, str(part)) for section in sections]
        sections = [unfolded for node in inner for unfolded in _unfolded(node, schema["$defs"])]
    known = [name for section in sections for name in section.get("properties", ())]
    return closest(str(path[-1]), known)


def _inner(section: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of what a section has under a name: a field, or any member of a mapping."""
    of_any_name = [*section.get("patternProperties", {}).values(), section.get("additionalProperties") or {}]
    found: dict[str, Any] = section.get("properties", {}).get(name) or of_any_name[0]
    return found


def _unfolded(node: dict[str, Any], shared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a node of a JSON schema stands for: itself, or what it refers to."""
    if "$ref" in node:
        node = shared[node["$ref"].rpartition("/")[2]]
    for alternative in node.get("anyOf", ()):
        yield from _unfolded(alternative, shared)
    if "anyOf" not in node:
        yield node


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"override {override!r} must look like section.field=value")
    try:
        # A range ends with a bracket that YAML does not accept.
        value = text if RANGE.fullmatch(text.strip()) else read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {key!r}: the value is not YAML: {error}") from None
    *parents, last = key.split(".")
    target = data
    for parent in parents:
        target = target.setdefault(_known_as(parent, target), {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    target[_known_as(last, target)] = value


def _known_as(name: str, section: dict[Any, Any]) -> Any:
    """Return the key that a section has for a name: YAML reads `2` as a number."""
    return next((key for key in section if str(key) == name), name)


def _plain_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_copy(item) for key, item in value.items()}
    return value
