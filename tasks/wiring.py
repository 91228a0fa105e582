"""The composition root: the only place that makes a store, environments and models from a recipe.

This module does not import Prefect, which takes seconds, so that commands without a flow are fast.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentr_core.environment import Environment
from agentr_core.environments import registry
from agentr_core.episodes.transcript import set_opening
from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.methods.faults import load
from agentr_core.methods.table import method_of
from agentr_core.models.checkpoint_dir import check_model_directory
from agentr_core.models.local.workers import LoadCommand, load_local
from agentr_core.models.openai.chat import OpenAIModel, make_endpoint
from agentr_core.models.vllm.door import RemoteFleet
from agentr_core.models.vllm.replicas import make_launch, make_replicas
from agentr_core.protocols import ChatModel
from agentr_core.recipes.models import ModelConfig, ModelRole, ServerConfig
from agentr_core.recipes.recipe import Recipe, replace
from agentr_core.replies import ActionChoice, LabelStyle
from agentr_core.reports.document import page_path
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import Equipment
from agentr_core.runtime.machine import bfloat16_hardware, resolve_auto
from agentr_core.runtime.start import opening_of, run_id_of
from agentr_core.store.codec.trajectories import AnsweredCalls
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import last_promotion
from agentr_core.system import shipped_models
from tasks import runners
from tasks.workspaces import find_run, open_store, stored_recipe


@dataclass(frozen=True)
class RunRef:
    """A run and its workspace. Tasks pass only this to each other; the rest is in the store."""

    workspace: str
    run_id: str


def run_reference(recipe: Recipe) -> RunRef:
    """Return the reference to the run of a recipe. Raises `ModelDirectoryError` if the directory of
    its model cannot be used.
    """
    return RunRef(workspace=recipe.workspace, run_id=run_id_of(recipe, method_of(recipe)))


def load_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """Return the recipe in a file, with overrides applied. `auto` is replaced by what suits this
    machine, and `model.from_run` by the path of the model that the run ended with.

    A recipe that names no workspace gets `default_workspace()`. Each environment is made once, as a
    check. Raises `ConfigError` if the recipe, its arms or its environments' options are wrong, or
    the package of its task runner is not installed; `StoreError` if `model.from_run` is set and
    there is no store.
    """
    recipe = resolve_auto(_with_model_of_run(load(path, overrides, workspace=default_workspace())))
    method_of(recipe).check_recipe(recipe)
    runners.check(recipe.scale)
    for name, world in recipe.worlds().items():
        env = make_environment(world)
        env.close()
        if recipe.environments and env.name != name:
            raise ConfigError(
                f"environments.{name}: instances of {world.environment.name} are named after {env.name}; put it under "
                f"that key, with name: {world.environment.name}"
            )
    return recipe


def default_workspace() -> str:
    """Return the workspace of a recipe that names none: AGENTR_WORKSPACE, or `runs`."""
    return os.environ.get("AGENTR_WORKSPACE") or "runs"


def _with_model_of_run(recipe: Recipe) -> Recipe:
    """Return a recipe with the path of the model that the run in `model.from_run` ended with; the
    recipe itself if it names no run.

    Raises `ConfigError` if that run does not exist or is not finished.
    """
    if not recipe.model.from_run:
        return recipe
    workspace = Path(recipe.workspace)
    run_id = find_run(workspace, recipe.model.from_run)
    promotion = last_promotion(open_store(workspace), run_id)
    if promotion is None:
        raise ConfigError(f"model.from_run: run {run_id} is not finished; let it go on, or give model.path")
    # Runs that start with the same model share its row in the store, so the path in the row may be
    # another run's; the run's own is in its recipe.
    path = promotion.path if promotion.iteration else stored_recipe(workspace, run_id).model.path
    return replace(recipe, model=dataclasses.replace(recipe.model, path=path, from_run=""))


def quiet_context(run: RunRef, recipe: Recipe | None = None) -> RunContext:
    """Return the context of a stage that shows neither progress nor alarms; without `recipe`, for
    the stored recipe of the run. Raises `ConfigError` if the store has no such run.
    """
    root = Path(run.workspace)
    run_recipe, store = recipe or stored_recipe(root, run.run_id, patient=True), open_store(root, patient=True)
    ctx = RunContext(
        recipe=run_recipe,
        method=method_of(run_recipe),
        run_id=run.run_id,
        root=root,
        store=store,
        make_environment=lambda world: make_environment(run_recipe.in_world(world), store),
        load_model=lambda role, policy: load_model(run_recipe, role, policy, at=ctx.started_at()),
        progress=_ignore_progress,
        on_alarm=lambda alarm: None,
    )
    return ctx


def equipment(recipe: Recipe, run_id: str, at: datetime | None) -> Equipment:
    """Return the equipment of a cluster's worker: like `quiet_context`, but without a store. `at`
    is when the run started.
    """
    return Equipment(
        recipe=recipe,
        run_id=run_id,
        make_environment=lambda world: make_environment(recipe.in_world(world)),
        load_model=lambda role, policy: load_model(recipe, role, policy, at=at),
        progress=_ignore_progress,
    )


def _ignore_progress(done: int, total: int, note: str) -> None:
    """Ignore a report of progress."""


def make_environment(recipe: Recipe, store: Store | None = None) -> Environment:
    """Return a new environment for a recipe of one world. Its episodes begin with what
    `environment.prompt` sets, and answers of its tools are stored in `store`, if given.
    """
    world = recipe.environment
    env = named_environment(
        world.name,
        world.options,
        transcript=world.transcript,
        labels=world.action.labels,
        take=world.action.take,
        workspace=recipe.workspace,
    )
    env.summary_prompt = recipe.summary.prompt
    opening = opening_of(recipe)
    if opening is not None:
        set_opening(env, opening)
    if store is not None:
        env.keep_answers(AnsweredCalls(store))
    return env


def named_environment(
    name: str,
    options: Mapping[str, Any],
    *,
    transcript: Literal["own", "native"] = "own",
    labels: LabelStyle = "lenient",
    take: ActionChoice = "last",
    workspace: str = "",
) -> Environment:
    """Return a new environment; missing options are taken from the environment variables that its
    class names. Its caches are in `workspace`, by default the usual one.
    """
    cache = Path(workspace or default_workspace()) / "cache"
    return registry.make(name, options, os.environ, transcript=transcript, labels=labels, take=take, cache=cache)


def gateway_token() -> str:
    """Return the token that a gateway started here asks for; empty if none is set."""
    return os.environ.get("AGENTR_GATEWAY_TOKEN", "")


class HubAccess(NamedTuple):
    """The address of the Hugging Face hub and a token for it; empty where the environment has
    none.
    """

    address: str
    token: str


def hub_access() -> HubAccess:
    """Return where and as whom datasets are pushed."""
    return HubAccess(os.environ.get("HF_ENDPOINT", ""), os.environ.get("HF_TOKEN", ""))


def load_model(recipe: Recipe, role: ModelRole, policy: Path, *, at: datetime | None = None) -> ChatModel:
    """Return the model of a role. For the actor, and for a role without a model of its own, that is
    the policy in the directory `policy`.

    `at` is when the run started, for chat templates that print the date.
    """
    models = recipe.own_models()
    logs = Path(recipe.workspace) / "logs"
    if role != "actor" and role in models:
        return make_model(models[role], Path(models[role].path), logs=logs, at=at)
    return make_model(recipe.model, policy, logs=logs, at=at)


def make_model(model: ModelConfig, path: Path, *, logs: Path, at: datetime | None = None) -> ChatModel:
    """Return the model that a section of a recipe describes, with the weights in the directory
    `path`; with backend `openai`, the model on its server.

    `logs` is the folder for the logs of vLLM servers that are started here, with a subfolder for
    each process; `at` is when the run started.
    """
    if model.backend == "vllm":
        return load_vllm(model, path, logs=logs / f"vllm-{os.getpid()}", at=at)
    if model.backend == "openai":
        return OpenAIModel.connect(
            make_endpoint(model.server, os.environ), model.server, context_length=model.context_length
        )
    return load_local(
        LoadCommand(
            path=path,
            dtype=model.dtype,
            device=model.device,
            max_batch=model.max_batch,
            context_length=model.context_length,
            prefix_cache_bytes=int(model.prefix_cache_gib * 2**30),
            at=at,
        ),
        num_workers=model.workers,
        timeout_seconds=model.worker_timeout,
    )


def named_model(name: str, *, server: str = "", context_length: int = 0) -> tuple[ChatModel, ModelConfig]:
    """Return a model, and the settings that it is run with. Without `server`, `name` is a model
    directory, else a shipped model, else a model on the server at OPENAI_BASE_URL.

    Args:
        server: the address of the server that has the model, up to and including `/v1`.
        context_length: the most tokens of prompt and reply together; 0: as the model says.

    Raises:
        ModelDirectoryError: there is no such model, or its directory is damaged.
        EndpointError: the server has no such model, or refuses us.
    """
    path = Path(name)
    models = shipped_models()
    if not server and not path.is_dir() and name in models:
        path = models[name]
    if server or (not path.is_dir() and os.environ.get("OPENAI_BASE_URL")):
        # A local server rarely asks for a key, so none has to be set.
        key = "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else ""
        server_config = ServerConfig(model=name, base_url=server, api_key_env=key)
        config = ModelConfig(backend="openai", server=server_config, context_length=context_length)
    else:
        if not path.is_dir():
            raise ModelDirectoryError(
                f"{name} is no model directory, and none of the shipped models ({', '.join(models)}); for one on a "
                "server, give --server URL or set OPENAI_BASE_URL"
            )
        check_model_directory(path)
        config = ModelConfig(
            path=str(path), dtype="bfloat16" if bfloat16_hardware() else "float32", context_length=context_length
        )
    return make_model(config, path, logs=Path(default_workspace()) / "logs"), config


def load_vllm(model: ModelConfig, path: Path, *, logs: Path, at: datetime | None = None) -> ChatModel:
    """Return the model in a directory, run by vLLM: by the servers of `agentr models serve` at
    AGENTR_VLLM or, if that is not set, by replicas that are started here.
    """
    from agentr_core.models.vllm.model import VllmModel
    from tasks.progress import print_line

    launch = make_launch(path, model)
    fleet_address = os.environ.get("AGENTR_VLLM")
    if fleet_address:
        return VllmModel(launch, RemoteFleet(fleet_address, launch), at=at)
    # No other client has the key, so the weights can be replaced between steps of group RL.
    launch = dataclasses.replace(launch, key=secrets.token_hex(16))
    return VllmModel(
        launch, make_replicas(launch, environment=vllm_environment(), logs=logs, report_line=print_line), at=at
    )


def viewer_address() -> str:
    """Return AGENTR_VIEW_URL, the address of a viewer of the workspace (such as
    http://127.0.0.1:4280), without its query; the empty string if it is not set.
    """
    # The address that a viewer prints for other machines contains its token, which must not be
    # passed on.
    return os.environ.get("AGENTR_VIEW_URL", "").split("?")[0].rstrip("/")


def viewer_page(kind: str, key: str) -> str:
    """Return the address of a page of the viewer, such as kind `run` and the run's id as `key`; the
    empty string if AGENTR_VIEW_URL is not set.
    """
    base = viewer_address()
    return f"{base}{page_path(kind, key)}" if base else ""


def vllm_environment() -> Path:
    """Return the folder of vLLM's environment: AGENTR_VLLM_ENV, or `.venv-vllm` in the working
    directory.
    """
    return Path(os.environ.get("AGENTR_VLLM_ENV", ".venv-vllm"))
