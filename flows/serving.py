"""Serve deployments, one for each recipe: run them from Prefect's UI, schedules or command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import serve

from agentr_core.errors import ConfigError
from agentr_core.methods.faults import load
from agentr_core.methods.table import method_of, plan_of
from agentr_core.system import shipped_recipes
from flows import server, stages
from flows.collecting import collect_only, improve
from flows.compare import compare
from flows.flywheel import flywheel

FLOWS: dict[str, Any] = {"flywheel": flywheel, "compare": compare}


def deployments(recipes: Sequence[Path]) -> list[Any]:
    """Return a deployment for each recipe (without any, for each shipped one), named after it, and
    one for each stage. A recipe that gathers experience before it trains also gets a deployment for
    each of these halves.

    Raises `ConfigError` for a recipe that is wrong, and for two recipes with the same name.
    """
    paths = list(recipes) or [Path(name) for name in shipped_recipes()]
    all_deployments, paths_by_name = [], dict[str, Path]()
    for path in paths:
        recipe = load(path)
        kind = method_of(recipe).flow
        # On a server, the second would silently take the place of the first.
        if (other := paths_by_name.setdefault(f"{kind}/{recipe.name}", path)) is not path:
            raise ConfigError(
                f"{other} and {path} are both named {recipe.name}, and so would be their deployments; give one of them "
                "another name"
            )
        halves = [collect_only, improve] if kind == "flywheel" and plan_of(recipe, 1).gathering_stages else []
        all_deployments += [
            flow.to_deployment(
                name=recipe.name, parameters={"recipe": str(path)}, description=recipe.description, tags=["agentr"]
            )
            for flow in (FLOWS[kind], *halves)
        ]
    all_deployments += [
        stage_flow.to_deployment(name=stage_flow.fn.__name__, tags=["agentr"])
        for stage_flow in stages.all_stage_flows()
    ]
    return all_deployments


def serve_recipes(recipes: Sequence[Path]) -> None:
    """Serve the deployments until interrupted. Raises `ConfigError` as `deployments` does, if
    PREFECT_API_URL names no server that answers, and if one of the deployments belongs to a work
    pool.
    """
    all_deployments = deployments(recipes)
    server.require_server("a deployment")
    names = server.deployments_on_work_pools(
        [f"{deployment.flow_name}/{deployment.name}" for deployment in all_deployments]
    )
    if names:
        raise ConfigError(
            f"{', '.join(names)} on this server belong to work pools, made by `prefect deploy`, and serving them here "
            "would take them off; start a worker for their pool instead, or serve on another server"
        )
    serve(*all_deployments)
