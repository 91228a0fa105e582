"""The start and the end of a run: its rows in the store, and the model it begins with."""

from __future__ import annotations

import asyncio
import dataclasses
import platform
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from agentr_core.environments import registry
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory
from agentr_core.protocols.abilities import Sandboxed
from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe, identifying, replace, resolved
from agentr_core.runtime.identity import identity, teacher_of
from agentr_core.runtime.inputs import contents, input_files, input_ids
from agentr_core.runtime.machine import bfloat16
from agentr_core.runtime.place import Method, Stage, Workplace
from agentr_core.runtime.prompts import prompt_files
from agentr_core.runtime.trained_on import check_run
from agentr_core.store import Store
from agentr_core.store.codec.copies import OF_DATASETS, OF_FILES, known_input, stage_input_rows
from agentr_core.store.codec.ledger import Status, checkpoint_rows, iteration_rows, run_rows
from agentr_core.store.queries.iterations import count_finished_iterations, iteration_state
from agentr_core.store.queries.runs import RunState, checkpoint_with, run_state
from agentr_core.store.snapshot import snapshot
from agentr_core.store.tables import Rows, merge

PACKAGES = ("agentr", "torch", "transformers", "trl", "openai", "prefect", "duckdb", "numpy")
# Until 2026-11-28 a recipe had a section `base`, whose defaults are in the ids of all runs.
_BASE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "intermediate_size": 704,
    "sliding_window": 4,
    "max_position_embeddings": 2048,
    "tokens": 20_000_000,
    "batch_tokens": 4096,
    "learning_rate": 0.02,
    "embedding_learning_rate": 0.003,
    "warmup_steps": 100,
    "judge_share": 0.2,
    "mistake_share": 0.0,
    "procedural_share": 0.5,
    "rename_share": 0.65,
    "drills": 0,
    "output": "",
    "num_threads": 0,
}


def run_id_of(recipe: Recipe, method: Method) -> str:
    """Return the id of a run, made of what the recipe asks for and what the models contain.

    More iterations of the same recipe go on with the same run, and so do other arms, seeds and
    trainings of the same comparison: its run is the pool, and each arm has a run of its own. The
    contents of every role's model are part of the id, and so of the ids of all that they make:
    trees and episodes of the actor, judgements and verdicts of the judge. So are the contents of
    files of demonstrations, of pairs and of the worlds, and the version of a world's texts once
    these have changed.
    """
    own = recipe.own_models()
    behaviour = {
        role: behaviour_files_sha256(Path(model.path)) for role, model in own.items() if model.backend != "openai"
    }
    files = input_files(recipe)
    models = {role: identity(model) for role, model in own.items()}
    further = files, recipe.compare.pool, _changed_worlds(recipe), prompt_files(recipe)
    return fingerprint("run", asked_for(recipe, method), models, behaviour, *filter(None, further))


def _changed_worlds(recipe: Recipe) -> dict[str, int]:
    """Return the versions above 1 of the texts of a recipe's worlds, by name; a single world is
    named `environment`.
    """
    versions = {
        name if recipe.environments else "environment": registry.version_of(
            world.environment.name, world.environment.options
        )
        for name, world in recipe.worlds().items()
    }
    return {name: version for name, version in versions.items() if version > 1}


def asked_for(recipe: Recipe, method: Method) -> dict[str, Any]:
    """Return what a recipe of a method asks for as plain data.

    Left out are how far the run goes and where, the numbers of machines and processes, the GPUs,
    the size of the prefix cache, the patience with workers, the prices, and the comparison that the
    run belongs to.
    """
    anywhere = recipe.training.anywhere()
    plain = identifying(replace(recipe, iterations=1, workspace="", description="", training=anywhere))
    del plain["scale"], plain["compare"]
    plain["base"] = _BASE
    method.identify(recipe, plain)
    for section in (plain["model"], *filter(None, plain["models"].values())):
        del section["prices"], section["prefix_cache_gib"], section["workers"]
        section["vllm"].pop("gpus", None)
        section["vllm"].pop("sleep", None)
        section.pop("worker_timeout", None)
    return plain


async def start(place: Workplace, *, evaluates: bool = False, collects: bool = False) -> dict[str, Any]:
    """Store the run, its iteration 0 and the model it begins with; what is stored already stays.

    With `evaluates` the run only evaluates the model, with `collects` it only gathers experience; a
    run that was begun as a whole keeps its status.

    Raises:
        ModelDirectoryError: the model is unsound.
        ConfigError: the general data are not those with which the run began to train.
        StoreError: weights that the run has made were not made of the rows of the store.
        SandboxError: code of a model cannot be confined here as the recipe says.
    """
    check_run(place)
    model = place.recipe.model
    if model.backend != "openai":
        check_model_directory(Path(model.path))
    checkpoint_id = fingerprint("checkpoint", digest := identity(model))
    config = resolved(place.recipe)
    known = run_state(place.store, place.run_id)
    status, ended, config["iterations"] = _course(place, known, evaluates=evaluates, collects=collects)
    now = datetime.now(UTC)
    general = [] if evaluates or collects else _general_data(place)
    # A run that is known keeps what it began with.
    confined = {} if known else await asyncio.to_thread(_sandboxes, place)
    own = run_rows(
        place.run_id,
        recipe=place.recipe.name,
        method=place.recipe.method,
        config=config,
        versions={**versions(), "bfloat16": bfloat16() or "not fast here", **confined},
        workspace=str(place.root),
        status=status,
        started_at=now,
        finished_at=ended,
    )
    base_model = checkpoint_rows(
        checkpoint_id,
        path=model.label,
        weights_sha256=digest,
        config={},
        # If the run goes on from another one, its model is a checkpoint of that run.
        parent_id=checkpoint_with(place.store, digest),
    )
    inputs = [stage_input_rows(place.run_id, {OF_FILES: _files(place.recipe)}), *([] if known else _inputs(place, now))]
    place.store.write(merge([own, base_model, *_teacher(place), *inputs, *general]))
    base = place.iteration_id(0)
    if iteration_state(place.store, base) is None:
        place.store.write(iteration_rows(base, run_id=place.run_id, iteration=0, checkpoint_out=checkpoint_id))
    return {"run_id": place.run_id, "checkpoint": checkpoint_id}


def _course(
    place: Workplace, known: RunState | None, *, evaluates: bool, collects: bool
) -> tuple[Status, datetime | None, int]:
    """Return the status of a run that starts, when it ended, and its number of iterations."""
    # Neither an evaluation nor a collection changes how far a run goes or how it ended.
    if known is not None and (evaluates or collects):
        return known.status, known.finished_at, known.iterations
    return "evaluating" if evaluates else "collecting" if collects else "running", None, place.recipe.iterations


def check_files(place: Workplace, stage: Stage) -> None:
    """Raise `ConfigError` if the files of a run are not what they were when it was last started;
    also if the general data are not, for a stage that reads them.

    A start looks for the run of the files that are there. What goes on with a run by its id, such
    as its next stage, must not go on with other files.
    """
    known = known_input(place.store, place.run_id, OF_FILES)
    if known not in (None, _files(place.recipe)):
        named = ", ".join([*input_files(place.recipe), *prompt_files(place.recipe)]) or "its files"
        raise ConfigError(
            f"run {place.run_id} cannot go on: {named} are not what they were when it was started; bring them back, "
            "or run the recipe anew"
        )
    if "data" in stage.reads:
        _general_data(place)


def _files(recipe: Recipe) -> str:
    return fingerprint(input_files(recipe), prompt_files(recipe))


def goal_with(store: Store, run_id: str, more: int) -> int:
    """Return how many iterations a run has once it is extended by `more`.

    A run that has not ended keeps the goal that it began with: after an interruption, nothing is
    added to what remains to be done.
    """
    finished, state = count_finished_iterations(store, run_id), run_state(store, run_id)
    under_way = state is not None and state.status in ("running", "failed")
    return state.iterations if state is not None and under_way else finished + more


async def begin(place: Workplace, iteration: int) -> None:
    """Store that an iteration is running; a finished iteration stays finished."""
    with snapshot(place.store) as state:
        now, key = dataclasses.replace(place, store=state), place.iteration_id(iteration)
        if iteration_state(state, key) is not None:
            return
        policy, collector = now.policy(iteration), now.collector(iteration)
        state.write(
            iteration_rows(
                key,
                run_id=place.run_id,
                iteration=iteration,
                checkpoint_in=policy.id,
                collected_by=None if collector.role == "actor" else collector.id,
            )
        )


async def end(place: Workplace, iteration: int) -> None:
    """Store that an iteration is finished; one that was finished before keeps its time."""
    key = place.iteration_id(iteration)
    state = iteration_state(place.store, key)
    if state is None or state.status != "finished":
        place.store.update("iteration", {"iteration_id": key, "status": "finished", "finished_at": _now()})


async def finish(place: Workplace, status: Literal["finished", "failed"], *, evaluates: bool = False) -> None:
    """Store how a run ended; with `evaluates`, only if the run was just an evaluation."""
    known = run_state(place.store, place.run_id)
    if evaluates and known is not None and known.status != "evaluating":
        return
    place.store.update("run", {"run_id": place.run_id, "status": status, "finished_at": _now()})


def _sandboxes(place: Workplace) -> dict[str, str]:
    """Return how far each world confines code of a model here, by a name for it."""
    found = {}
    for name, world in place.recipe.worlds().items():
        if registry.runs_code(world.environment.name):
            with closing(place.make_environment(name)) as env:
                if isinstance(env, Sandboxed) and (level := env.sandbox()):
                    found[f"sandbox of {env.name}"] = level
    return found


def _teacher(place: Workplace) -> list[Rows]:
    teacher = teacher_of(place.recipe)
    if teacher is None:
        return []
    return [
        checkpoint_rows(
            teacher.id,
            path=str(teacher.path),
            weights_sha256=teacher.weights_sha256,
            config={},
            parent_id=checkpoint_with(place.store, teacher.weights_sha256),
        )
    ]


def _inputs(place: Workplace, now: datetime) -> list[Rows]:
    """Return the rows of what decides a new run's replies; none for one that takes those of a
    pool.
    """
    recipe = place.recipe
    if recipe.compare.pool:
        return []
    own = recipe.own_models()
    weights: dict[ModelRole, str] = {role: identity(model) for role, model in own.items() if role != "actor"}
    begun = place.started_at() or now
    asked, files, prompts = asked_for(recipe, place.method), input_files(recipe), prompt_files(recipe)
    known = input_ids(recipe, asked, weights=weights, files=files, prompts=prompts, at=begun)
    inputs = {stage: key for stage, key in known.items() if stage in place.method.taken_over}
    return [stage_input_rows(place.run_id, inputs)]


def _general_data(place: Workplace) -> list[Rows]:
    """Return the row of what is in the file of general data; none where it is stored already.

    Raises `ConfigError` if that is not what is in the file now: the run's id has only its name.
    """
    general = place.recipe.data.general
    if not general.share:
        return []
    content = contents(Path(general.file), place.recipe)
    known = known_input(place.store, place.run_id, OF_DATASETS)
    if known not in (None, content):
        raise ConfigError(
            f"data.general.file: {general.file} is not what it was when run {place.run_id} began to train; bring its "
            "contents back, or give other conversations a file of another name"
        )
    return [stage_input_rows(place.run_id, {OF_DATASETS: content})]


def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)
