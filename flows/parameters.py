"""The parameters of deployments, with choices and ranges, from which Prefect builds a form; and the
hooks and names that the flows share.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, cast

from coolname.data import config
from prefect import Flow, get_client, runtime
from prefect.client.schemas import FlowRun, State
from prefect.states import Cancelled, Failed
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.json_schema import SkipJsonSchema

from agentr_core.errors import RunBusy
from agentr_core.recipes.parsing import yaml_quoted
from agentr_core.texts import did_you_mean

P = ParamSpec("P")
Absent = SkipJsonSchema[None]
"""None, hidden from the JSON schema: Prefect's form adds a switch to a type that may be None."""
Iterations = Annotated[int, Field(ge=0, le=10_000)] | Absent
"""A number of iterations; 0 leaves it to the recipe."""
Units = Annotated[int, Field(ge=0)] | Absent
"""The most trees, episodes or questions that one collection begins; 0 means all."""
Overrides = Sequence[str] | Absent
"""Changes to a recipe, each as `section.field=value`."""
Enough = Annotated[int, Field(ge=1)]
"""How many trajectories are enough to train on."""
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|"
    "psi|omega"
)


def run_name() -> str:
    """Return the name of the current flow run: the one that a person typed, else the name of the
    recipe's file without its ending, followed by the seed, if a setting or an override sets one.
    """
    if not _is_generated(name := str(runtime.flow_run.name or "")):
        return name
    parameters = runtime.flow_run.parameters
    # Prefect has the settings as they were sent, or as the record that they were read into.
    settings = parameters.get("settings")
    seed = settings.get("seed") if isinstance(settings, Mapping) else getattr(settings, "seed", None)
    changes = [*([] if seed is None else [f"seed={seed}"]), *(parameters.get("overrides") or ())]
    seeds = [change for change in changes if change.startswith("seed=")]
    # The last one counts, as in `merged_overrides`.
    return " ".join([Path(parameters["recipe"]).stem, *seeds[-1:]])


def _is_generated(name: str) -> bool:
    """Return whether a name was generated, not typed by a person: Prefect's server joins two words
    of coolname; its form joins a Greek letter, often with a number, and one or two words.
    """
    parts = cast(Mapping[str, Mapping[str, Any]], config)
    words = {word for part in parts.values() for word in part.get("words", ())}
    by_server = name.count("-") == 1 and words.issuperset(name.split("-"))
    return not name or by_server or re.fullmatch(rf"({_GREEK})\d*-\S+", name) is not None


async def fail_on_unknown_parameters(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Set a crashed flow run to Failed, with a message that names the parameters, if it was given
    parameters that its flow does not have; leave other crashed runs as they are. For `on_crashed`.

    `prefect deployment run` refuses such a parameter, but a schedule, an automation or an API
    request can pass one. Prefect then ends the process before the flow begins, and the state says
    no more than that the process exited.
    """
    parameters = list(inspect.signature(flow.fn).parameters)
    unknown = [f"{name}{did_you_mean(name, parameters)}" for name in flow_run.parameters if name not in parameters]
    if unknown:
        message = f"unknown parameter {', '.join(unknown)}; flow {flow.name} takes {', '.join(parameters)}"
        async with get_client() as client:
            await client.set_flow_run_state(flow_run.id, Failed(message=message), force=True)


def cancel_if_busy(work: Callable[P, Awaitable[Any]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Wrap the function of a flow so that, if another process is working on its run, it returns the
    state Cancelled with the message of `RunBusy`: a second start is no failure.
    """

    @wraps(work)
    async def run_unless_busy(*args: P.args, **options: P.kwargs) -> Any:
        try:
            return await work(*args, **options)
        except RunBusy as busy:
            return Cancelled(message=str(busy))

    return run_unless_busy


def _empty_field(description: str) -> Any:
    """Return a form field that is empty by default. The default None must not be in its schema: the
    form would send it, and Prefect refuse it, since it is not of the field's type.
    """
    return Field(default_factory=lambda: None, description=description)


class Settings(BaseModel):
    """The fields of a recipe that are changed most often; a field left empty stays as the recipe
    says.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)] | Absent = _empty_field("Folder of the model that the run starts with.")
    workspace: Annotated[str, Field(min_length=1)] | Absent = _empty_field(
        "Folder of the store, checkpoints and reports."
    )
    seed: Annotated[int, Field(ge=0)] | Absent = _empty_field("Another seed is another run.")
    train_limit: Annotated[int, Field(ge=0)] | Absent = _empty_field("Training instances of an iteration; 0 means all.")
    test_limit: Annotated[int, Field(ge=0)] | Absent = _empty_field("Test instances that are evaluated; 0 means all.")
    draw: Literal["fresh", "fixed"] | Absent = _empty_field("Training instances of each iteration.")
    promote: Literal["last", "best"] | Absent = _empty_field("Which checkpoint goes on.")
    learning_rate: Annotated[float, Field(gt=0, le=1)] | Absent = _empty_field("Of fine-tuning.")
    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Absent = _empty_field(
        "Samples of a batch on one device."
    )
    dtype: Literal["auto", "float32", "bfloat16"] | Absent = _empty_field("Number format of a local model.")
    runner: Literal["local", "dask", "ray"] | Absent = _empty_field("Who grows trees and plays episodes.")

    @model_serializer(mode="wrap")
    def _set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields that are set."""
        return {name: value for name, value in dump(self).items() if value is not None}

    def overrides(self) -> list[str]:
        """Return the fields that are set, each as an override `section.field=value`."""
        fields = self.model_dump()
        values = {
            name: yaml_quoted(value) if isinstance(value, str) else json.dumps(value) for name, value in fields.items()
        }
        return [f"{_RECIPE_FIELD_BY_SETTING.get(name, name)}={value}" for name, value in values.items()]


UNCHANGED = Settings()
"""Settings that change nothing."""
_RECIPE_FIELD_BY_SETTING = {
    "model": "model.path",
    "train_limit": "instances.train_limit",
    "test_limit": "instances.test_limit",
    "draw": "instances.draw",
    "learning_rate": "training.learning_rate",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "dtype": "model.dtype",
    "runner": "scale.runner",
}


def merged_overrides(settings: Settings | None, overrides: Iterable[str] | None) -> list[str]:
    """Return the overrides of `settings`, followed by `overrides`, which take precedence."""
    return [*(settings.overrides() if settings else []), *(overrides or [])]
