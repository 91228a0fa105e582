"""One flow for each stage. Each can be run alone on a run: `prefect deployment run stage/collect`.
All have the name `stage`, so that Prefect lists them apart from the recipes.

A stage that writes to the store holds the lock of its run. Called by a flow that already holds it,
such as `flywheel`, the stage shares it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, flow
from pydantic import Field

from agentr_core.methods.table import all_stages
from flows.parameters import Absent, fail_on_unknown_parameters
from tasks import reporting, runs, stages
from tasks.wiring import RunRef, default_workspace
from tasks.workspaces import stored_recipe

RunId = Annotated[str, Field(min_length=1)]
Iteration = Annotated[int, Field(ge=0)]
Workspace = str | Absent
# Prefect's form describes a parameter by its entry in the docstring, and by nothing else.
_PARAMETERS = """

Args:
    run_id: the id of a run, as `agentr runs` lists it.
    iteration: counted from 1; 0 is what comes before the first one.
    workspace: the store's folder; empty: that of AGENTR_WORKSPACE where it runs, else `runs`.
"""


def __getattr__(name: str) -> Flow[..., Coroutine[Any, Any, Any]]:
    """Return the flow of the stage `name`: Prefect loads a deployment's flow as an attribute of its
    module. Raises `AttributeError` if there is no such stage.
    """
    if name not in all_stages():
        raise AttributeError(f"module {__name__} has no flow {name}")
    return flow_of_stage(name)


@cache
def flow_of_stage(name: str) -> Flow[..., Coroutine[Any, Any, Any]]:
    """Return the flow of the stage with this name."""

    async def stage_flow(run_id: RunId, iteration: Iteration, workspace: Workspace = "") -> Any:
        run = _reference(run_id, workspace)
        # Raises if there is no such run; `run_locked` would create the folder of a mistyped
        # workspace.
        stored_recipe(Path(run.workspace), run.run_id)
        with runs.run_locked(run):
            return await stages.perform(run, iteration, name)

    stage_flow.__name__ = stage_flow.__qualname__ = name
    stage_flow.__doc__ = all_stages()[name].about + _PARAMETERS
    return flow(name="stage", flow_run_name=f"{name}-{{iteration}}", on_crashed=[fail_on_unknown_parameters])(
        stage_flow
    )


@flow(name="stage", flow_run_name="report-{iteration}", on_crashed=[fail_on_unknown_parameters])
async def report(run_id: RunId, iteration: Iteration, workspace: Workspace = "") -> str:
    """Write the report of an iteration and its artifacts; return the path of its page.

    Args:
        run_id: the id of a run, as `agentr runs` lists it.
        iteration: counted from 1.
        workspace: the store's folder; empty: that of AGENTR_WORKSPACE where it runs, else `runs`.
    """
    return await reporting.report(_reference(run_id, workspace), iteration)


def all_stage_flows() -> list[Flow[..., Coroutine[Any, Any, Any]]]:
    """Return the flows of all stages of all methods."""
    return [*map(flow_of_stage, all_stages()), report]


def _reference(run_id: str, workspace: str | None) -> RunRef:
    return RunRef(workspace=workspace or default_workspace(), run_id=run_id)
