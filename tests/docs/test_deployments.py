"""The deployment file: every recipe has one, and every entrypoint and parameter is real."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint

from agentr_core.config import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    file, name = deployment["entrypoint"].split(":")
    found = load_flow_from_entrypoint(f"{ROOT / file}:{name}")
    assert isinstance(found, Flow)
    return found


def test_every_recipe_has_a_deployment_of_its_name() -> None:
    assert RECIPES
    parameters = {deployment["name"]: deployment["parameters"].get("recipe") for deployment in DEPLOYMENTS}
    for path in RECIPES:
        assert parameters.get(path.stem) == path.relative_to(ROOT).as_posix()


def test_names_are_unique() -> None:
    names = [(deployment["entrypoint"], deployment["name"]) for deployment in DEPLOYMENTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_the_entrypoint_is_a_flow_that_takes_the_parameters(deployment: dict[str, Any]) -> None:
    inspect.signature(flow_of(deployment).fn).bind(**deployment["parameters"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_the_recipe_exists_and_belongs_to_the_flow(deployment: dict[str, Any]) -> None:
    path = deployment["parameters"].get("recipe")
    if path is None:
        return
    recipe = load(ROOT / path)
    wanted = "base-model" if recipe.method == "base" else "flywheel"
    assert flow_of(deployment).name == wanted


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_names_a_pool_and_says_what_it_is(deployment: dict[str, Any]) -> None:
    assert deployment["work_pool"]["name"]
    assert deployment["description"]
    for schedule in deployment.get("schedules", ()):
        assert schedule["active"] is False, "nothing runs by itself before its owner says so"
