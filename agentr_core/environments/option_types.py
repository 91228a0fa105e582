"""The types of an environment's options, as its constructor states them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from agentr_core.recipes.wrong_values import given, sentence


def option_faults(kind: Any, options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the types of options for an environment's class, one sentence each.
    An option without an annotation, or with one of a type of its own, may have any value.
    """
    types = _types(kind)
    told = ((name, _wrong(types[name], value)) for name, value in options.items() if name in types)
    return [f"environment.options.{name}: {why} (got {given(options[name])})" for name, why in told if why]


def _wrong(expected: TypeAdapter[Any], value: Any) -> str:
    try:
        # As JSON, a list is also a tuple or a set, and yet no text is a number.
        expected.validate_json(json.dumps(value), strict=True)
    except TypeError:
        # Not a value that a recipe can have.
        return ""
    except ValidationError as error:
        return sentence(error.errors(include_url=False, include_input=False))
    return ""


@lru_cache(maxsize=32)
def _types(kind: Any) -> Mapping[str, TypeAdapter[Any]]:
    try:
        hints = get_type_hints(kind.__init__ if inspect.isclass(kind) else kind)
    except (NameError, TypeError):
        return {}
    return {name: made for name, hint in hints.items() if (made := _adapter(hint)) is not None}


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return None
