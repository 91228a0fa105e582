"""Events that tell Prefect's server about a run, for the page `Event Feed` and for automations.

Prefect adds what it knows of the current run: flow run, flow, deployment, work queue, tags. An
event is sent in the background, and a server that does not listen delays nothing; events that a
killed process did not send are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

from prefect.events import emit_event

from agentr_core.runtime.context import RunContext
from agentr_core.store.queries.runs import IterationProducts, iteration_products
from agentr_core.store.tables import Alarm
from tasks.wiring import viewer_page

DATASET = "agentr.dataset.published"
CHECKPOINT = "agentr.checkpoint.published"
FINISHED = "agentr.iteration.finished"
COLLECTED = "agentr.trajectories.collected"
ALARM = "agentr.alarm.raised"


@contextmanager
def send_product_events(ctx: RunContext, iteration: int, before: IterationProducts) -> Iterator[None]:
    """Send an event for each product that the block added to an iteration since `before`: its
    dataset, its checkpoint, its end. None are sent for iteration 0, whose model existed already.
    """
    yield
    products = products_of_iteration(ctx, iteration)
    if products.dataset_id is not None and before.dataset_id is None:
        payload = {
            "dataset_id": products.dataset_id,
            "hash": products.dataset_hash,
            "page": viewer_page("dataset", products.dataset_id),
        }
        _emit(DATASET, f"agentr.dataset.{products.dataset_id}", ctx, iteration, payload)
    if products.checkpoint_id is not None and products.checkpoint_id != before.checkpoint_id:
        page = viewer_page("checkpoint", products.checkpoint_id)
        payload = {"checkpoint_id": products.checkpoint_id, "path": products.checkpoint_path, "page": page}
        _emit(CHECKPOINT, f"agentr.checkpoint.{products.checkpoint_id}", ctx, iteration, payload)
    if products.finished and not before.finished:
        payload = {"checkpoint_id": products.checkpoint_id, "page": viewer_page("run", ctx.run_id)}
        _emit(FINISHED, _iteration(ctx, iteration), ctx, iteration, payload)


def send_collected(
    ctx: RunContext,
    iteration: int,
    *,
    trajectories: int,
    enough: bool,
    training_parameters: dict[str, Any],
    send_again: bool,
) -> None:
    """Send an event: trajectories were gathered for an iteration that is still to be trained.

    Args:
        trajectories: how many the iteration has by now.
        enough: whether that is as many as were asked for; becomes the label `agentr.enough`.
        training_parameters: the parameters with which a deployment trains on them.
        send_again: send the event even if the server already has one with the same numbers.
    """
    payload = {
        "trajectories": trajectories,
        "parameters": training_parameters,
        "page": viewer_page("run", ctx.run_id),
    }
    # A label, since Prefect's triggers count events and cannot add up numbers in their payload.
    label = {"agentr.enough": "true" if enough else "false"}
    # The number of trajectories tells one such event from the others of its iteration.
    key = f"{_iteration(ctx, iteration)}/{trajectories}/{enough}{f'/{uuid4()}' if send_again else ''}"
    _emit(COLLECTED, _iteration(ctx, iteration), ctx, iteration, payload, labels=label, key=key)


def send_alarm(ctx: RunContext, iteration: int, alarm: Alarm) -> None:
    """Send an event about an alarm, with its name and the run's reaction to it as labels."""
    payload = {**asdict(alarm), "page": viewer_page("run", ctx.run_id)}
    labels = {"agentr.alarm": alarm.name, "agentr.reaction": alarm.reaction}
    _emit(ALARM, f"agentr.alarm.{alarm.id}", ctx, iteration, payload, labels=labels)


def products_of_iteration(ctx: RunContext, iteration: int) -> IterationProducts:
    """Return the products that an iteration has so far; for iteration 0 always none."""
    return iteration_products(ctx.store, ctx.iteration_id(iteration)) if iteration else IterationProducts()


def _iteration(ctx: RunContext, iteration: int) -> str:
    return f"agentr.iteration.{ctx.iteration_id(iteration)}"


def _emit(
    event: str,
    resource: str,
    ctx: RunContext,
    iteration: int,
    extra_payload: dict[str, Any],
    *,
    labels: dict[str, str] | None = None,
    key: str = "",
) -> None:
    """Send an event in the background. Its id is a hash of its name, the store and `key` (empty:
    `resource`), so that the server keeps a repeated event only once.
    """
    recipe = ctx.recipe.name
    name = f"{recipe}, iteration {iteration}"
    resource_labels = {
        "prefect.resource.id": resource,
        "prefect.resource.name": name,
        "agentr.recipe": recipe,
        **(labels or {}),
    }
    store = str(Path(ctx.store.path).absolute())
    resources = [
        {"prefect.resource.id": f"agentr.run.{ctx.run_id}", "prefect.resource.role": "run"},
        {"prefect.resource.id": f"agentr.store.{store}", "prefect.resource.role": "store"},
    ]
    if resource != _iteration(ctx, iteration):
        resources.append({"prefect.resource.id": _iteration(ctx, iteration), "prefect.resource.role": "iteration"})
    payload = {"run_id": ctx.run_id, "recipe": recipe, "iteration": iteration, "store": store, **extra_payload}
    event_id = uuid5(NAMESPACE_URL, f"{event}/{store}/{key or resource}")
    emit_event(event, resource_labels, related=resources, payload=payload, id=event_id)
