"""The parameters of deployments, with choices and ranges: Prefect makes a form from them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

from prefect import Flow, get_client, runtime
from prefect.client.schemas import FlowRun, State
from prefect.states import Cancelled, Failed
from pydantic import BaseModel, ConfigDict, Field

from agentr_core.errors import RunBusy
from agentr_core.recipes.parsing import quoted
from agentr_core.texts import closest

P = ParamSpec("P")
Iterations = Annotated[int | None, Field(ge=1, le=10_000)]
"""A number of iterations."""
Units = Annotated[int | None, Field(ge=1)]
"""How much one collection gathers."""
Enough = Annotated[int, Field(ge=1)]
"""How many trajectories are worth a training."""


def run_name() -> str:
    """Return the name of the present flow run: that of its recipe's file, and the seed if an
    override sets it.
    """
    given = runtime.flow_run.parameters
    seeds = [change for change in given.get("overrides") or () if change.startswith("seed=")]
    return " ".join([Path(given["recipe"]).stem, *seeds])


async def name_unknown(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Give a crashed run that was asked for with parameters which its flow lacks the state Failed,
    whose message names them; leave other crashed runs as they are. A hook, `on_crashed`.

    `prefect deployment run` refuses such a parameter. A schedule, an automation or a request can
    have it: Prefect then ends the process before the flow begins, and the state says no more than
    that the process exited.
    """
    known = list(inspect.signature(flow.fn).parameters)
    unknown = [f"{name}{closest(name, known)}" for name in flow_run.parameters if name not in known]
    if unknown:
        message = f"unknown parameter {', '.join(unknown)}; flow {flow.name} takes {', '.join(known)}"
        async with get_client() as client:
            await client.set_flow_run_state(flow_run.id, Failed(message=message), force=True)


def cancelled_while_busy(work: Callable[P, Awaitable[Any]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Return the function of a flow that ends as Cancelled, with the sentence of `RunBusy`, where
    another process is working on its run: a second start is no failure.
    """

    @wraps(work)
    async def unless_busy(*args: P.args, **options: P.kwargs) -> Any:
        try:
            return await work(*args, **options)
        except RunBusy as busy:
            return Cancelled(message=str(busy))

    return unless_busy


class Settings(BaseModel):
    """The fields of a recipe that are changed most often; a field left empty stays as the recipe
    says.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace: str | None = Field(
        default=None, min_length=1, description="Folder of the store, checkpoints and reports."
    )
    seed: int | None = Field(default=None, ge=0, description="Another seed is another run.")
    train_limit: int | None = Field(default=None, ge=0, description="Training instances of an iteration; 0 means all.")
    draw: Literal["fresh", "fixed"] | None = Field(default=None, description="Training instances of each iteration.")
    promote: Literal["last", "best"] | None = Field(default=None, description="Which checkpoint goes on.")
    learning_rate: float | None = Field(default=None, gt=0, le=1)
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        default=None, description="Number format of a local model."
    )
    runner: Literal["local", "dask", "ray"] | None = Field(
        default=None, description="Who grows trees and plays episodes."
    )

    def overrides(self) -> list[str]:
        """Return the fields that are set as changes to a recipe, `section.field=value`."""
        given = self.model_dump(exclude_none=True)
        values = {name: quoted(one) if isinstance(one, str) else json.dumps(one) for name, one in given.items()}
        return [f"{_FIELDS.get(name, name)}={value}" for name, value in values.items()]


_FIELDS = {
    "train_limit": "instances.train_limit",
    "draw": "instances.draw",
    "learning_rate": "training.learning_rate",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "dtype": "model.dtype",
    "runner": "scale.runner",
}


def changes(settings: Settings | None, overrides: list[str] | None) -> list[str]:
    """Return all changes to a recipe, the free ones last, so that they take precedence."""
    return [*(settings.overrides() if settings else []), *(overrides or [])]
