"""The deployment file: every recipe has one, and every entrypoint and parameter is real."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import prefect
import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._triggers import _initialize_deployment_triggers
from prefect.events import DeploymentEventTrigger, EventTrigger, ResourceSpecification
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import load_flow_from_entrypoint
from prefect.settings.models.flows import FlowsSettings

from agentr_core.methods.faults import load
from agentr_core.methods.table import SHIPPED, method_named, plan_of
from tasks import events

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
KUBERNETES = ROOT / "deployments" / "kubernetes"
PODS: list[dict[str, Any]] = yaml.safe_load((KUBERNETES / "prefect.yaml").read_text())["deployments"]
POOL: dict[str, Any] = yaml.safe_load((KUBERNETES / "work-pool.yaml").read_text())


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    file, name = deployment["entrypoint"].split(":")
    flow: Flow[..., Any] = load_flow_from_entrypoint(f"{ROOT / file}:{name}")
    assert isinstance(flow, Flow)
    return flow


def test_every_recipe_has_a_deployment_of_its_name() -> None:
    assert RECIPES
    parameters = {deployment["name"]: deployment["parameters"].get("recipe") for deployment in DEPLOYMENTS}
    for path in RECIPES:
        assert parameters.get(path.stem) == path.relative_to(ROOT).as_posix()


def test_names_are_unique() -> None:
    names = [(deployment["entrypoint"], deployment["name"]) for deployment in DEPLOYMENTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("deployment", [*DEPLOYMENTS, *PODS], ids=lambda deployment: deployment["entrypoint"])
def test_the_entrypoint_is_a_flow_that_takes_the_parameters(deployment: dict[str, Any]) -> None:
    inspect.signature(flow_of(deployment).fn).bind_partial(**deployment["parameters"])
    assert deployment["parameters"] or flow_of(deployment).name == "stage"


@pytest.mark.parametrize("deployment", [*DEPLOYMENTS, *PODS], ids=lambda deployment: deployment["entrypoint"])
def test_the_recipe_exists_and_belongs_to_the_flow(deployment: dict[str, Any]) -> None:
    path = deployment["parameters"].get("recipe")
    if path is None:
        return
    recipe = load(ROOT / path, deployment["parameters"].get("overrides", ()))
    expected = {"compare": "compare", "compare-runs": "compare"}.get(recipe.method, "flywheel")
    name = flow_of(deployment).name
    assert name == expected or (name in ("collect-only", "improve") and plan_of(recipe, 1).gathering_stages)


def test_each_stage_has_a_deployment() -> None:
    names = {stage.name for method in SHIPPED for stage in method_named(method).stages}
    stage_deployments = [each for each in DEPLOYMENTS if flow_of(each).name == "stage"]
    assert {each["name"] for each in stage_deployments} == {*names, "report"}
    assert all(flow_of(each).fn.__name__ == each["name"] for each in stage_deployments)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_names_a_queue_and_says_what_it_is(deployment: dict[str, Any]) -> None:
    assert deployment["work_pool"]["name"] == "agentr"
    assert deployment["work_pool"]["work_queue_name"] == ("gpu" if "gpu" in deployment["tags"] else "cpu")
    assert deployment["description"]
    for schedule in deployment.get("schedules", ()):
        assert schedule["active"] is False, "nothing runs by itself before its owner says so"
        assert "parameters" not in schedule, "Prefect 3.9 empties those of a schedule that is paused or resumed"
        arguments = inspect.signature(flow_of(deployment).fn).bind(**deployment["parameters"]).arguments
        assert arguments.get("more") == 1 or "limit" in arguments, "each time does new work"


def test_improve_is_started_by_what_collect_only_tells_and_by_nothing_of_its_own() -> None:
    halves = {flow_of(each).name: each for each in DEPLOYMENTS if each["entrypoint"].startswith("flows/collecting.py:")}
    assert halves.keys() == {"collect-only", "improve"}
    (spec,) = halves["improve"]["triggers"]
    (trigger,) = _initialize_deployment_triggers("improve/textcraft-tiny", [spec])
    assert isinstance(trigger, DeploymentEventTrigger)
    assert trigger.expect == {events.COLLECTED}
    assert not trigger.enabled, "nothing runs by itself before its owner says so"
    assert trigger.match == ResourceSpecification({"agentr.recipe": "textcraft-tiny", "agentr.enough": "true"})
    assert load(ROOT / halves["improve"]["parameters"]["recipe"]).name == "textcraft-tiny"
    assert not any(each.get("triggers") for each in DEPLOYMENTS if each is not halves["improve"])
    assert halves["collect-only"]["parameters"]["enough"] == halves["improve"]["parameters"]["enough"]


def test_the_automations_are_what_prefect_takes() -> None:
    automations = yaml.safe_load((ROOT / "deployments" / "automations.yaml").read_text())["automations"]
    failure, alarm, loss = (AutomationCore.model_validate(each) for each in automations)
    assert isinstance(failure.trigger, EventTrigger)
    assert isinstance(alarm.trigger, EventTrigger)
    assert isinstance(loss.trigger, EventTrigger)
    assert [action.type for action in (*failure.actions, *alarm.actions, *loss.actions)] == [
        "send-notification",
        "send-notification",
        "change-flow-run-state",
    ]
    assert failure.trigger.expect == {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
    assert loss.trigger.posture.value == "Proactive"
    # A run that sends signs of life at Prefect's own pace may miss two of them.
    assert loss.trigger.within.total_seconds() > 3 * (FlowsSettings().heartbeat_frequency or 0)
    tags = {tag for each in DEPLOYMENTS for tag in each["tags"]}
    assert alarm.trigger.expect == {events.ALARM}
    for each in (failure, alarm, loss):
        assert isinstance(each.trigger, EventTrigger)
        assert isinstance(each.trigger.match_related, ResourceSpecification)
        (tag,) = each.trigger.match_related["prefect.resource.id"]
        assert tag.removeprefix("prefect.tag.") in tags


def test_the_template_of_pods_is_that_of_prefect_with_volumes_and_gpus() -> None:
    """Prefect carries the template of its Kubernetes worker; ours keeps its shape and names every
    variable it uses.
    """
    (path,) = Path(prefect.__file__).parent.rglob("aggregate-worker-metadata.json")
    official = json.loads(path.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    variables = set(re.findall(r"{{ (\w+) }}", json.dumps(POOL["job_configuration"])))

    assert variables == set(POOL["variables"]["properties"])
    assert set(POOL["job_configuration"]) == set(official["job_configuration"]) - {"cluster_config"}
    manifest, theirs = (each["job_configuration"]["job_manifest"] for each in (POOL, official))
    assert set(manifest) == set(theirs)
    assert set(manifest["spec"]) == set(theirs["spec"])
    for name, field in POOL["variables"]["properties"].items():
        if name in official["variables"]["properties"]:
            assert field["type"] == official["variables"]["properties"][name]["type"], name
    for deployment in PODS:
        assert set(deployment["work_pool"]["job_variables"]) <= variables


def test_the_parts_of_the_cluster_fit_together() -> None:
    parts = {(part["kind"], part["metadata"]["name"]): part for part in manifests()}
    claims = {name for kind, name in parts if kind == "PersistentVolumeClaim"}
    service = parts["Service", "dask-scheduler"]

    assert {POOL["variables"]["properties"][f"{name}_claim"]["default"] for name in ("workspace", "models")} == claims
    assert service["spec"]["selector"] == labels(parts["Deployment", "dask-scheduler"])
    address = f"tcp://dask-scheduler:{service['spec']['ports'][0]['port']}"
    assert address in parts["Deployment", "dask-worker"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert any(f"scale.address={address}" in each["parameters"]["overrides"] for each in PODS)
    assert {each["work_pool"]["name"] for each in PODS} == {"agentr-kubernetes"}
    for kind, name in parts:
        if kind == "Deployment":
            assert parts[kind, name]["spec"]["selector"]["matchLabels"] == labels(parts[kind, name])


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / "cluster.yaml").read_text()))


def labels(deployment: dict[str, Any]) -> Any:
    return deployment["spec"]["template"]["metadata"]["labels"]
