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

from agentr_core.runtime.place import Workplace
from agentr_core.store.queries.runs import IterationProducts, published
from agentr_core.store.tables import Alarm
from tasks.wiring import viewer_page

DATASET = "agentr.dataset.published"
CHECKPOINT = "agentr.checkpoint.published"
FINISHED = "agentr.iteration.finished"
COLLECTED = "agentr.trajectories.collected"
ALARM = "agentr.alarm.raised"


@contextmanager
def tell_changes(place: Workplace, iteration: int, before: IterationProducts) -> Iterator[None]:
    """Send an event for each product that the block added to an iteration since `before`: its
    dataset, its checkpoint, its end. None are sent for iteration 0, whose model existed already.
    """
    yield
    after = published_by(place, iteration)
    if after.dataset_id is not None and before.dataset_id is None:
        payload = {
            "dataset_id": after.dataset_id,
            "hash": after.dataset_hash,
            "page": viewer_page("dataset", after.dataset_id),
        }
        _emit(DATASET, f"agentr.dataset.{after.dataset_id}", place, iteration, payload)
    if after.checkpoint_id is not None and after.checkpoint_id != before.checkpoint_id:
        page = viewer_page("checkpoint", after.checkpoint_id)
        payload = {"checkpoint_id": after.checkpoint_id, "path": after.checkpoint_path, "page": page}
        _emit(CHECKPOINT, f"agentr.checkpoint.{after.checkpoint_id}", place, iteration, payload)
    if after.finished and not before.finished:
        payload = {"checkpoint_id": after.checkpoint_id, "page": viewer_page("run", place.run_id)}
        _emit(FINISHED, _iteration(place, iteration), place, iteration, payload)


def collected(
    place: Workplace, iteration: int, *, trajectories: int, enough: bool, again: dict[str, Any], anew: bool
) -> None:
    """Send an event: trajectories were gathered for an iteration that is still to be trained.

    Args:
        trajectories: how many the iteration has by now.
        enough: whether that is as many as were asked for; becomes the label `agentr.enough`.
        again: the parameters with which a deployment trains on them.
        anew: send the event even if the server already has one with the same numbers.
    """
    payload = {"trajectories": trajectories, "parameters": again, "page": viewer_page("run", place.run_id)}
    # A label, since Prefect's triggers count events and cannot add up numbers in their payload.
    label = {"agentr.enough": "true" if enough else "false"}
    # The number of trajectories tells one such event from the others of its iteration.
    key = f"{_iteration(place, iteration)}/{trajectories}/{enough}{f'/{uuid4()}' if anew else ''}"
    _emit(COLLECTED, _iteration(place, iteration), place, iteration, payload, labels=label, key=key)


def raised(place: Workplace, iteration: int, alarm: Alarm) -> None:
    """Send an event about an alarm, with its name and the run's reaction to it as labels."""
    payload = {**asdict(alarm), "page": viewer_page("run", place.run_id)}
    labels = {"agentr.alarm": alarm.name, "agentr.reaction": alarm.reaction}
    _emit(ALARM, f"agentr.alarm.{alarm.id}", place, iteration, payload, labels=labels)


def published_by(place: Workplace, iteration: int) -> IterationProducts:
    """Return the products that an iteration has so far; for iteration 0 always none."""
    return published(place.store, place.iteration_id(iteration)) if iteration else IterationProducts()


def _iteration(place: Workplace, iteration: int) -> str:
    return f"agentr.iteration.{place.iteration_id(iteration)}"


def _emit(
    event: str,
    resource: str,
    place: Workplace,
    iteration: int,
    more: dict[str, Any],
    *,
    labels: dict[str, str] | None = None,
    key: str = "",
) -> None:
    """Send an event in the background. Its id is a hash of its name, the store and `key` (empty:
    `resource`), so that the server keeps a repeated event only once.
    """
    recipe = place.recipe.name
    name = f"{recipe}, iteration {iteration}"
    about = {"prefect.resource.id": resource, "prefect.resource.name": name, "agentr.recipe": recipe, **(labels or {})}
    store = str(Path(place.store.path).absolute())
    resources = [
        {"prefect.resource.id": f"agentr.run.{place.run_id}", "prefect.resource.role": "run"},
        {"prefect.resource.id": f"agentr.store.{store}", "prefect.resource.role": "store"},
    ]
    if resource != _iteration(place, iteration):
        resources.append({"prefect.resource.id": _iteration(place, iteration), "prefect.resource.role": "iteration"})
    payload = {"run_id": place.run_id, "recipe": recipe, "iteration": iteration, "store": store, **more}
    event_id = uuid5(NAMESPACE_URL, f"{event}/{store}/{key or resource}")
    emit_event(event, about, related=resources, payload=payload, id=event_id)
