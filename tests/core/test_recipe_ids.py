"""What a recipe of version 269e248 asked for has the same ids now: fields that came later do not
count while unset.
"""

from __future__ import annotations

from typing import Any

import pytest

from agentr_core.environments import registry
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes import Recipe, parse
from agentr_core.runtime.start import asked_for

COMPARISON = {"compare": {"arms": {"a": ["data.use=good"]}}, "training": {"max_tokens": 10}}


def recipe(method: str, more: dict[str, Any]) -> Recipe:
    return parse({"name": "old", "method": method, "model": {"path": "m"}, **more})


@pytest.mark.parametrize(
    ("method", "more", "known"),
    [
        ("agent-r", {"splice": {"mode": "verified"}}, "3ec749b24017d233"),
        ("eto", {}, "e3f8ccafc92cd64e"),
        ("compare", COMPARISON, "fcc78bee724dbbdb"),
    ],
)
def test_old_recipes_keep_their_ids(method: str, more: dict[str, Any], known: str) -> None:
    assert fingerprint(asked_for(recipe(method, more))) == known


def test_sections_keep_their_ids() -> None:
    plain = recipe("agent-r", {})
    assert fingerprint(plain.search) == "f15d8090396629d1"
    assert fingerprint(plain.evaluation, plain.instances) == "33009ecf949de8b8"
    assert fingerprint(plain.data) == "450423b13146e934"


def test_only_a_world_that_says_other_things_now_gets_other_ids() -> None:
    version = registry.version_of
    assert [version(name, {}) for name in ("textcraft", "webshop", "sciworld", "nowhere")] == [1, 1, 1, 1]
    assert version("sciworld", {"setting": "eto"}) == 2
