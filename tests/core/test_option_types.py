"""The types of an environment's options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from agentr_core.environments.registry import option_faults


class World:
    def __init__(
        self,
        *,
        names: Sequence[str] = (),
        size: int = 3,
        seconds: float = 1.0,
        folder: Path | str = "",
        kind: Literal["a", "b"] = "a",
        pair: tuple[int, int] | None = None,
        own: World | None = None,
        free: Any = None,
    ) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {"names": ["x"], "size": 2, "seconds": 2, "folder": "x", "kind": "b", "pair": [1, 2]},
        {"pair": None, "folder": Path("x"), "free": {"a": 1}, "unknown": 3},
        {"own": 3},
    ],
)
def test_values_of_their_types_are_taken(options: dict[str, Any]) -> None:
    assert option_faults(World, options) == []


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("size", "3", "give a whole number (got '3')"),
        ("size", True, "give a whole number (got true)"),
        ("seconds", None, "give a number (got nothing)"),
        ("names", "numbers", "give a list (got 'numbers')"),
        ("kind", "c", "give a or b (got 'c')"),
        ("pair", [1], "a value is missing (got [1])"),
    ],
)
def test_a_value_of_another_type_is_named(option: str, value: object, said: str) -> None:
    assert option_faults(World, {option: value}) == [f"environment.options.{option}: {said}"]
