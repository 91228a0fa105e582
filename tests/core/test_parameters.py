"""The form that Prefect makes of the parameters of the flows: choices, ranges, and what they become
of a recipe.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError as Refused
from prefect.utilities.schema_tools.validation import validate
from pydantic import ValidationError

from agentr_core.methods.faults import load
from flows.collecting import collect_only, improve
from flows.compare import compare
from flows.flywheel import flywheel
from flows.parameters import Settings, merged_overrides, run_name
from flows.stages import flow_of_stage, report

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "textcraft-tiny.yaml"
SET: dict[str, Any] = {
    "model": "data/models/tiny",
    "workspace": "/tmp/w:1 #",
    "seed": 3,
    "train_limit": 7,
    "test_limit": 5,
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
    assert fields["promote"]["enum"] == ["last", "best"]
    assert fields["learning_rate"].items() >= {"type": "number", "exclusiveMinimum": 0, "maximum": 1}.items()
    assert schema["properties"]["overrides"]["description"].startswith("advanced: any field of the recipe")
    assert schema["required"] == ["recipe"]


@pytest.mark.parametrize("flow", [flywheel, collect_only, improve, compare, flow_of_stage("train"), report])
def test_no_field_of_the_form_has_a_switch_to_none_or_sends_one(flow: Any) -> None:
    schema = parameter_schema(flow).model_dump()
    assert "anyOf" not in str(schema)
    defaults = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    assert "'default': None" not in str(schema)
    values = dict.fromkeys(schema["required"], "aaaa") | ({"iteration": 1} if "iteration" in schema["required"] else {})
    validate(values | defaults, schema, raise_on_error=True)


def test_a_wrong_value_is_refused_by_the_name_of_its_field() -> None:
    schema = parameter_schema(flywheel).model_dump()
    with pytest.raises(Refused, match=r"field 'settings\.learning_rate'.*5 is greater than the maximum of 1"):
        validate({"recipe": "r", "settings": {"learning_rate": 5}}, schema, raise_on_error=True)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("my third try", "my third try"),
        ("ablation-2", "ablation-2"),
        ("textcraft-tiny", "textcraft-tiny"),
        ("bronze-otter", "textcraft-eto-tiny seed=2"),
        ("lambda12-galor-quadrant", "textcraft-eto-tiny seed=2"),
    ],
)
def test_a_run_keeps_the_name_that_was_typed(name: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"recipe": "deployments/recipes/textcraft-eto-tiny.yaml", "overrides": ["seed=2"]}
    monkeypatch.setattr("flows.parameters.runtime.flow_run", SimpleNamespace(name=name, parameters=parameters))
    assert run_name() == shown


@pytest.mark.parametrize("settings", [{"seed": 3}, Settings(seed=3)], ids=["sent", "read"])
def test_a_run_is_named_after_the_seed_that_counts(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters: dict[str, Any] = {"recipe": "textcraft-tiny", "settings": settings, "overrides": None}
    monkeypatch.setattr("flows.parameters.runtime.flow_run", SimpleNamespace(name="", parameters=parameters))
    assert run_name() == "textcraft-tiny seed=3"
    parameters["overrides"] = ["seed=4", "seed=5"]
    assert run_name() == "textcraft-tiny seed=5"
    parameters |= {"settings": None, "overrides": ["iterations=1"]}
    assert run_name() == "textcraft-tiny"


def test_what_is_set_is_what_the_recipe_says() -> None:
    plain = load(RECIPE)
    recipe = load(RECIPE, merged_overrides(Settings(**SET), ["seed=4"]))
    assert (recipe.workspace, recipe.seed, recipe.promote) == ("/tmp/w:1 #", 4, "last")
    assert recipe.model.path.endswith("data/models/tiny")
    assert (recipe.instances.train_limit, recipe.instances.test_limit, recipe.instances.draw) == (7, 5, "fixed")
    assert (recipe.training.learning_rate, recipe.training.per_device_train_batch_size) == (2e-5, 2)
    assert (recipe.model.dtype, recipe.scale.runner) == ("float32", "local")
    assert load(RECIPE, merged_overrides(Settings(workspace="/tmp/é 😀"), None)).workspace == "/tmp/é 😀"
    assert load(RECIPE, merged_overrides(Settings(), None)) == load(RECIPE, merged_overrides(None, [])) == plain


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"promote": "worst"}, {"learning_rate": 0}, {"unknown": 1}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**wrong)


@pytest.mark.parametrize("flow", [flywheel, collect_only, improve, compare, flow_of_stage("train"), report])
def test_the_form_explains_each_parameter(flow: Any) -> None:
    properties = parameter_schema(flow).model_dump()["properties"]
    assert not [name for name, field in properties.items() if not field.get("description")]
