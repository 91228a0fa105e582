"""The form that Prefect makes of the parameters of the flows: choices, ranges, and what they become
of a recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from agentr_core.methods.faults import load
from flows.collecting import collect_only, improve
from flows.compare import compare
from flows.flywheel import flywheel
from flows.parameters import Settings, changes
from flows.stages import of, report

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "textcraft-tiny.yaml"
SET: dict[str, Any] = {
    "workspace": "/tmp/w:1 #",
    "seed": 3,
    "train_limit": 7,
    "draw": "fixed",
    "promote": "last",
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 2,
    "dtype": "float32",
    "runner": "local",
}


@pytest.mark.parametrize("flow", [flywheel, collect_only, improve], ids=lambda each: each.name)
def test_the_form_has_choices_and_ranges(flow: Any) -> None:
    schema = parameter_schema(flow).model_dump()
    fields = schema["definitions"]["Settings"]["properties"]
    assert fields.keys() == SET.keys()
    assert {"enum": ["last", "best"], "type": "string"} in fields["promote"]["anyOf"]
    assert {"type": "number", "exclusiveMinimum": 0, "maximum": 1} in fields["learning_rate"]["anyOf"]
    assert schema["properties"]["overrides"]["description"].startswith("advanced: any field of the recipe")
    assert schema["required"] == ["recipe"]


def test_what_is_set_is_what_the_recipe_says() -> None:
    plain = load(RECIPE)
    recipe = load(RECIPE, changes(Settings(**SET), ["seed=4"]))
    assert (recipe.workspace, recipe.seed, recipe.promote) == ("/tmp/w:1 #", 4, "last")
    assert (recipe.instances.train_limit, recipe.instances.draw) == (7, "fixed")
    assert (recipe.training.learning_rate, recipe.training.per_device_train_batch_size) == (2e-5, 2)
    assert (recipe.model.dtype, recipe.scale.runner) == ("float32", "local")
    assert load(RECIPE, changes(Settings(workspace="/tmp/é 😀"), None)).workspace == "/tmp/é 😀"
    assert load(RECIPE, changes(Settings(), None)) == load(RECIPE, changes(None, [])) == plain


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"promote": "worst"}, {"learning_rate": 0}, {"unknown": 1}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**wrong)


@pytest.mark.parametrize("flow", [flywheel, collect_only, improve, compare, of("train"), report])
def test_the_form_explains_each_parameter(flow: Any) -> None:
    properties = parameter_schema(flow).model_dump()["properties"]
    assert not [name for name, told in properties.items() if not told.get("description")]
