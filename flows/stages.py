"""One flow a stage, each runnable alone on a run: `prefect deployment run 'collect/...'`.

A stage that writes to the store holds the lock of its run; within the wheel, which holds it already, they share it.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks import reporting, runs, stages
from tasks.wiring import RunRef


def _reference(run_id: str, workspace: str) -> RunRef:
    return RunRef(workspace=workspace, run_id=run_id, iterations=0)


@flow(name="collect", flow_run_name="collect-{iteration}")
async def collect(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Grow the trees of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        await stages.begin(run, iteration)
        return await stages.collect(run, iteration)


@flow(name="critique", flow_run_name="critique-{iteration}")
async def critique(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Judge the bad paths of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        return await stages.critique(run, iteration)


@flow(name="splice", flow_run_name="splice-{iteration}")
async def splice(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Make the samples of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        return await stages.splice(run, iteration)


@flow(name="demonstrate", flow_run_name="demonstrate-{iteration}")
async def demonstrate(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Play the expert on the training instances of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        await stages.begin(run, iteration)
        return await stages.demonstrate(run, iteration)


@flow(name="explore", flow_run_name="explore-{iteration}")
async def explore(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Let the policy play the training instances of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        await stages.begin(run, iteration)
        return await stages.explore(run, iteration)


@flow(name="prefer", flow_run_name="prefer-{iteration}")
async def prefer(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Make the preference pairs of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        await stages.begin(run, iteration)
        return await stages.prefer(run, iteration)


@flow(name="dataset", flow_run_name="dataset-{iteration}")
async def dataset(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Build the dataset of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        return await stages.dataset(run, iteration)


@flow(name="train", flow_run_name="train-{iteration}")
async def train(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Train on the dataset of an iteration."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        return await stages.train(run, iteration)


@flow(name="evaluate", flow_run_name="evaluate-{iteration}")
async def evaluate(run_id: str, iteration: int, workspace: str = "runs") -> dict[str, Any]:
    """Evaluate the checkpoint of an iteration; 0 is the model the run began with."""
    run = _reference(run_id, workspace)
    with runs.alone(run):
        return await stages.evaluate(run, iteration)


@flow(name="report", flow_run_name="report-{iteration}")
async def report(run_id: str, iteration: int, workspace: str = "runs") -> str:
    """Write the report of an iteration and its artifacts."""
    return await reporting.report(_reference(run_id, workspace), iteration)
