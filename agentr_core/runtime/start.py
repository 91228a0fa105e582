"""The start and the end of a run: its rows in the store, and the model it begins with."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

from agentr_core.environments import registry
from agentr_core.episodes.transcript import Opening, example_text
from agentr_core.errors import ConfigError, DataFileError, ModelDirectoryError, StoreError
from agentr_core.fingerprint import file_sha256, fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory, prints_date
from agentr_core.recipes.environments import PromptConfig
from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe, identifying_data, replace, resolved
from agentr_core.runtime.context import Method, RunContext, Stage
from agentr_core.runtime.equipment import model_identity, teacher_of
from agentr_core.runtime.machine import bfloat16_hardware, machine_facts
from agentr_core.samples.chat_file import conversation
from agentr_core.samples.record_files import records
from agentr_core.store.codec.ledger import Status, checkpoint_rows, iteration_rows, run_rows
from agentr_core.store.codec.trajectories import DATASETS_INPUT, FILES_INPUT, stage_input_rows, stored_input_id
from agentr_core.store.database import Store, snapshot
from agentr_core.store.queries.datasets import complete_dataset_hashes
from agentr_core.store.queries.runs import (
    checkpoint_of_iteration,
    count_finished_iterations,
    find_checkpoint_by_weights,
    iteration_state,
    run_state,
    trained_iteration_numbers,
)
from agentr_core.store.queries.trees import step_hashes
from agentr_core.store.tables import Rows, merge
from agentr_core.system import DISTRIBUTION, content_sha256, data_path
from agentr_core.texts import path_for_message, unreadable_reason
from agentr_core.training.checkpoints import Manifest, read_manifest
from agentr_core.types import NO_LIMITS, Message

# What determines the replies of a stage, as one hash: runs in which it is equal reuse each other's
# work.
#
# A reply depends on the policy, the iteration and the instance as well; these are told apart where
# rows are copied. What only later stages read is left out: how a model is trained, evaluated and
# reported does not change a tree.

VERSION = 1
"""Increase it when the same inputs would give different replies."""

SHIPPED_SHA256 = {
    "data/textcraft/recipes.json": "2da02ba812aaa3318174c333b6edb3343af076fe5cd8084e90f0ffb691f36298",
    "data/textcraft/split.json": "3cc34323c8a308e0c74e21c4dfa09c5ab828e29b86ee36b603f3d26614613e9e",
    "data/webshop/items_shuffle.json": "d6ead415b67e6680e0b5bf306eee48ecce27076f741d8832070e72f232a66f8d",
    "data/webshop/items_ins_v2.json": "c701559a14078ec97701c8b89d2267e55c91b7499d4c2d0317906c703eabe006",
    "data/webshop/items_human_ins.json": "261b316f72b8c67fd97b619b1db71e815206fd35ac784cf85bdca12017757ffa",
    "data/reasoning/numbers": "8b0206c773b089bf",
    "data/reasoning/encyclopaedia": "a08506fb4d3c1c9f",
    "data/reasoning/corpus.jsonl": "b4108e3bef7139bc99479ee9eeff0f7ef63da0641b03d9e41598d35864086e15",
}
"""The hashes of shipped files whose contents are left out of ids: all runs played from these before
file contents became part of ids. Never change an entry: a file with other contents gives other ids
by itself.
"""


def input_hashes(
    recipe: Recipe,
    settings: Mapping[str, Any],
    *,
    weights: Mapping[ModelRole, str],
    files: Mapping[str, str],
    prompts: Mapping[str, str],
    started_at: datetime,
) -> dict[str, str]:
    """Return, for each stage, the hash of what determines its replies.

    Args:
        settings: what the recipe asks for, as plain data (`start.identity_settings`).
        weights: the identities of the models, by role.
        files: the SHA-256 of files that the recipe names.
        prompts: the SHA-256 of files of prompts (`prompt_files`).
        started_at: when the run starts; its date is hashed if a chat template prints it.
    """

    def model(role: ModelRole) -> tuple[Any, ...]:
        config = recipe.model_of(role)
        data = settings["model"] if config is recipe.model else settings["models"][role]
        if config.backend == "openai":
            return data, weights.get(role, "")
        path = Path(config.path)
        # The actor's weights are those of the checkpoint that acts.
        digest = "" if config is recipe.model else weights[role]
        return data, digest, behaviour_files_sha256(path), started_at.date().isoformat() if prints_date(path) else ""

    world, train = _world_settings(recipe, settings)
    # What else decides how a recipe acts, apart from the actor and its world.
    extra_inputs: list[Any] = []
    if any(registry.asks_models(config.environment.name) for config in recipe.worlds().values()):
        # Rewards and observations may be made with these models as well.
        extra_inputs.append({role: model(role) for role in recipe.own_models() if role != "actor"})
    elif recipe.is_taught(1):
        extra_inputs.append({"teacher": model("teacher")})
    if recipe.is_taught(1):
        extra_inputs.append(recipe.teacher_iterations)
    if prompts:
        extra_inputs.append(prompts)
    if world_files := {name: files[name] for name in world_paths(recipe) if name in files}:
        extra_inputs.append(world_files)
    context = (recipe.context, settings.get("summary")) if recipe.context == "summary" else recipe.context
    acting = VERSION, recipe.seed, world, model("actor"), context, train, *extra_inputs
    collect = fingerprint("collect", *acting, settings["search"])
    eto = settings["eto"]
    grpo = recipe.grpo
    # Without them, ids stay what they were before these became part of them.
    extra_limits = [value for value in (grpo.stop, grpo.limits) if value not in ((), NO_LIMITS)]
    limits = grpo.max_steps, grpo.max_new_tokens, grpo.repeats, *extra_limits
    forks = eto["preferences"]["level"], eto["preferences"]["forced_steps"]
    # Episodes that go on from the expert's steps read what the editor wrote there.
    editors = [model("editor")] if recipe.eto.expert.thoughts.enabled else []
    # Methods without a flywheel have no such section.
    flywheel = settings.get("et_agent", {}).get("flywheel")
    return {
        "collect": collect,
        "critique": fingerprint("critique", collect, model("judge"), settings["critique"]),
        "evolve": fingerprint("evolve", *acting, flywheel, model("editor"), model("reflector")),
        "rollout": fingerprint("rollout", *acting, recipe.et_agent.curriculum.rollouts, limits),
        "explore": fingerprint(
            "explore", *acting, eto["explore"], eto["expert"], files, eto["phases"], *forks, *editors
        ),
        **_evaluation_hashes(recipe, settings, (world, model("actor"), context, *extra_inputs)),
    }


def _evaluation_hashes(recipe: Recipe, settings: Mapping[str, Any], acting: Sequence[Any]) -> dict[str, str]:
    """Return the hash of the inputs of the evaluation, as `evaluate`, and of each of its further
    sets, as `evaluate/NAME`. The hash of one set does not change when another set is added or
    another one becomes the development set, nor with the seed if all worlds repeat themselves and
    episodes are greedy.
    """
    worlds = [world.environment for world in recipe.worlds().values()]
    are_repeated = all(registry.is_deterministic(world.name, world.options) for world in worlds)

    def seed(temperature: float) -> tuple[int, ...]:
        return () if are_repeated and not temperature else (recipe.seed,)

    config = {field: value for field, value in settings["evaluation"].items() if field not in ("sets", "development")}
    instances = settings["environments"] if recipe.environments else settings["instances"]
    held_out = {field: value for field, value in instances.items() if recipe.environments or field.startswith("test")}
    shared_inputs = (VERSION, *acting, held_out, config)
    inputs = {"evaluate": fingerprint("evaluate", *shared_inputs, *seed(recipe.evaluation.temperature))}
    for name, chosen in settings["evaluation"].get("sets", {}).items():
        temperature = recipe.evaluation.sets[name].temperature
        inputs[f"evaluate/{name}"] = fingerprint("evaluate", *shared_inputs, *seed(temperature), chosen)
    return inputs


def world_paths(recipe: Recipe) -> dict[str, str]:
    """Return the files and folders that the worlds of a recipe play from, by their names in ids."""
    files: dict[str, str] = {}
    for world in recipe.worlds().values():
        files |= registry.files_of(world.environment.name, world.environment.options, os.environ)
    return files


def input_files(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of the files and folders that a recipe plays from or trains on, by their
    names in ids; shipped files with the contents in `SHIPPED_SHA256` are left out. Raises
    `DataFileError` if one cannot be read.
    """
    launch = recipe.training.launch
    # The name of a shipped file of settings is no path.
    settings = launch.deepspeed if launch and Path(launch.deepspeed).is_file() else ""
    names = (recipe.eto.expert.file, recipe.eto.preferences.file, settings)
    files = {**{name: name for name in names if name}, **world_paths(recipe)}
    hashes = {name: content_hash(Path(path), recipe) for name, path in files.items()}
    return {name: sha256 for name, sha256 in hashes.items() if SHIPPED_SHA256.get(name) != sha256}


def content_hash(path: Path, recipe: Recipe) -> str:
    """Return the SHA-256 of a file or folder that a recipe names, cached in the recipe's workspace.
    Raises `DataFileError` if it cannot be read.
    """
    try:
        return content_sha256(path, Path(recipe.workspace) / "cache")
    except OSError as error:
        raise DataFileError(
            f"the recipe's file {path_for_message(path)} cannot be read: {error.strerror or error}"
        ) from error


def _world_settings(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what a recipe asks of its world, or of all its worlds, and the splits from which it
    collects.
    """
    versions = {
        name: registry.version_of(world.environment.name, world.environment.options)
        for name, world in recipe.worlds().items()
    }
    if not recipe.environments:
        return (settings["environment"], versions[recipe.environment.name]), settings["instances"]["train"]
    fields = ("name", "options", "transcript", "prompt", "action", "search", "explore")
    worlds = {
        name: {field: world[field] for field in fields if field in world}
        for name, world in settings["environments"].items()
    }
    return (worlds, versions), {name: world["instances"]["train"] for name, world in settings["environments"].items()}


# The prompts of a recipe's worlds: the contents of their files.

EXAMPLES_FOLDER = "examples"
"""The folder of the shipped data with a file of examples for each world that has some."""


def opening_of(recipe: Recipe) -> Opening | None:
    """Return what the prompt of a recipe of one world puts before the first observation; None if
    the recipe sets no prompt.

    Raises:
        ConfigError: no examples are shipped for the world, or fewer than wanted.
        DataFileError: a file cannot be read, or is not a file of examples.
    """
    prompt = recipe.environment.prompt
    return None if prompt == PromptConfig() else _read_opening(prompt, recipe.environment.name)


def example_ids(recipe: Recipe) -> frozenset[str]:
    """Return the ids of the instances that the prompt's examples solve, for a recipe of one world;
    empty if its prompt has no examples. Raises as `opening_of`.
    """
    prompt = recipe.environment.prompt
    if not prompt.examples:
        return frozenset()
    file = _examples_file(prompt, recipe.environment.name)
    examples = islice(records(file, setting="environment.prompt.examples_file"), prompt.examples)
    return frozenset(str(record["id"]) for _, record in examples if "id" in record)


def prompt_files(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of each file that the prompts of a recipe name, by world and kind, for the
    run's id. Raises as `opening_of`.
    """
    hashes: dict[str, str] = {}
    for name, world in recipe.worlds().items():
        prompt = world.environment.prompt
        if prompt.instruction_file:
            hashes[f"instruction of {name}"] = _sha256(Path(prompt.instruction_file))
        if prompt.examples:
            hashes[f"examples of {name}"] = _sha256(_examples_file(prompt, world.environment.name))
    return hashes


# Cached, since hundreds of environments of a world are opened at once.
@lru_cache(maxsize=64)
def _read_opening(prompt: PromptConfig, environment: str) -> Opening:
    as_turns = prompt.examples_as == "turns"
    examples: list[Sequence[Message]] = []
    if prompt.examples:
        file = _examples_file(prompt, environment)
        for number, record in records(file, setting="environment.prompt.examples_file"):
            messages = [
                turn for turn in conversation(record, f"{file}:{number}") if turn.role not in ("system", "tools")
            ]
            if [turn.role for turn in messages[:2]] != ["user", "assistant"]:
                raise DataFileError(f"{file}:{number} must begin with the turn of the problem and then a reply")
            if as_turns and any(turn.role == next_turn.role for turn, next_turn in pairwise(messages)):
                raise DataFileError(
                    f"{file}:{number} has two turns of one role in a row, and a conversation alternates; join them, or "
                    "set environment.prompt.examples_as to text"
                )
            examples.append(messages)
        if len(examples) < prompt.examples:
            raise ConfigError(
                f"environment.prompt.examples is {prompt.examples}, and {file} has {len(examples)}; lower it, or name "
                "another file in environment.prompt.examples_file"
            )
    instruction = None
    if prompt.instruction_file:
        file = Path(prompt.instruction_file)
        try:
            instruction = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DataFileError(
                f"environment.prompt: file {path_for_message(file)} cannot be read: {unreadable_reason(error)}"
            ) from error
    selection = examples[: prompt.examples]
    turns: list[Message] = []
    for example in selection if as_turns else ():
        # Up to its last reply, as if it were an earlier episode of the conversation.
        last = max(number for number, turn in enumerate(example) if turn.role == "assistant")
        turns += [Message(role=turn.role, text=turn.text, example=True) for turn in example[: last + 1]]
    return Opening(
        system=prompt.system,
        instruction=instruction,
        examples=() if as_turns else tuple(map(example_text, selection)),
        turns=tuple(turns),
    )


def _examples_file(prompt: PromptConfig, environment: str) -> Path:
    if prompt.examples_file:
        return Path(prompt.examples_file)
    try:
        return data_path(EXAMPLES_FOLDER, f"{environment}.jsonl")
    except DataFileError as error:
        raise ConfigError(
            f"no examples come along for {environment}; make some with `agentr env examples {environment} FILE`, and "
            "name the file in environment.prompt.examples_file"
        ) from error


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise DataFileError(f"environment.prompt: file {path_for_message(file)} cannot be read: {error}") from error


# Whether weights on the disk are those that the rows of the store made.
#
# A store may lack the rows behind weights that are still on the disk: after `agentr store prune`,
# or when a backup was restored. The store could not say what a model that continues from such
# weights was trained on.


def step_rows_hash(ctx: RunContext, iteration_id: str) -> str:
    """Return one hash of the rows of all stored steps of group RL of an iteration."""
    return fingerprint(sorted(step_hashes(ctx.store, iteration_id).items()))


def check_weights(ctx: RunContext, iteration: int, folder: Path, *, parent_weights: str) -> None:
    """Raise `StoreError` unless published weights, which a stage found in `folder`, were made of
    rows that the store has and of `parent_weights`, the SHA-256 of the weights that the iteration
    starts from.
    """
    manifest = read_manifest(folder)
    if not _has_rows(ctx, iteration, manifest):
        raise StoreError(
            f"{folder} was trained on rows that {ctx.store.path} lacks or has otherwise (iteration {iteration} of "
            f"run {ctx.run_id}); put back a store that has them, or move that folder away and run again to train anew"
        )
    if manifest.parent_weights not in ("", parent_weights):
        raise StoreError(
            f"{folder} was trained from other weights than those with which iteration {iteration} of run "
            f"{ctx.run_id} begins now; move that folder away and run again to train anew"
        )


def check_run_weights(ctx: RunContext, *iterations: int) -> None:
    """Check the weights that some iterations of a run made, by default all: their hash must be the
    stored one, and the rows that they were trained on must be in the store.

    Weights whose folder is missing are not checked. Raises `StoreError` if a check fails.
    """
    numbers = trained_iteration_numbers(ctx.store, ctx.run_id)
    for iteration in numbers if not iterations else sorted({*numbers} & {*iterations}):
        checkpoint = checkpoint_of_iteration(ctx.store, ctx.iteration_id(iteration))
        try:
            manifest = read_manifest(checkpoint.path) if checkpoint is not None and checkpoint.trained else None
        except ModelDirectoryError:
            manifest = None
        if checkpoint is None or manifest is None:
            continue
        if manifest.weights_sha256 != checkpoint.weights_sha256:
            raise StoreError(
                f"the weights in {checkpoint.path} are not those that iteration {iteration} of run {ctx.run_id} made "
                f"according to {ctx.store.path}; put back the weights or the store that belong together, or take "
                "the run out with `agentr store prune`, move that folder away and run it again"
            )
        if not _has_rows(ctx, iteration, manifest):
            raise StoreError(
                f"{checkpoint.path} was trained on rows that {ctx.store.path} lacks or has otherwise (iteration "
                f"{iteration} of run {ctx.run_id}); put back a store that has them, or take the run out with "
                "`agentr store prune`, move that folder away and run it again"
            )


def _has_rows(ctx: RunContext, iteration: int, manifest: Manifest) -> bool:
    key = ctx.iteration_id(iteration)
    if manifest.dataset_hash:
        return manifest.dataset_hash in complete_dataset_hashes(ctx.store, key)
    if manifest.rows:
        return manifest.rows == step_rows_hash(ctx, key)
    # Weights of a version that wrote no hash: all their steps must be there.
    return len(step_hashes(ctx.store, key)) == manifest.steps


PACKAGES = ("torch", "transformers", "trl", "openai", "prefect", "duckdb", "numpy")
# Until 2026-11-28 a recipe had a section `base`, whose defaults are in the ids of all runs.
_BASE_DEFAULTS = {
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
    configs = recipe.own_models()
    behaviour = {
        role: behaviour_files_sha256(Path(model.path)) for role, model in configs.items() if model.backend != "openai"
    }
    files = input_files(recipe)
    models = {role: model_identity(model) for role, model in configs.items()}
    # Only versions above the first: ids of other runs stay what they were.
    all_versions = {
        name if recipe.environments else "environment": registry.version_of(
            world.environment.name, world.environment.options
        )
        for name, world in recipe.worlds().items()
    }
    text_versions = {name: version for name, version in all_versions.items() if version > 1}
    optional_inputs = files, recipe.compare.pool, text_versions, prompt_files(recipe)
    return fingerprint("run", identity_settings(recipe, method), models, behaviour, *filter(None, optional_inputs))


def identity_settings(recipe: Recipe, method: Method) -> dict[str, Any]:
    """Return what a recipe of a method asks for as plain data.

    Left out are how far the run goes and where, what is watched meanwhile, the numbers of machines
    and processes, the GPUs, the size of the prefix cache, the patience with workers, the prices,
    and the comparison that the run belongs to.
    """
    training = recipe.training.without_addresses()
    plain = identifying_data(replace(recipe, iterations=1, workspace="", description="", training=training))
    plain.pop("alarms", None)
    del plain["scale"], plain["compare"]
    plain["base"] = _BASE_DEFAULTS
    method.trim_identity(recipe, plain)
    for section in (plain["model"], *filter(None, plain["models"].values())):
        del section["prices"], section["prefix_cache_gib"], section["workers"]
        section["vllm"].pop("gpus", None)
        section["vllm"].pop("sleep", None)
        section.pop("worker_timeout", None)
    return plain


async def start_run(ctx: RunContext, *, evaluates: bool = False, collects: bool = False) -> dict[str, Any]:
    """Store the run, its iteration 0 and the model it begins with; what is stored already stays.

    With `evaluates` the run only evaluates the model, with `collects` it only gathers experience; a
    run that was begun as a whole keeps its status.

    Raises:
        ModelDirectoryError: the model is unsound.
        ConfigError: the general data are not those with which the run began to train.
        StoreError: weights that the run has made were not made of the rows of the store.
        SandboxError: the sandbox for a model's code fails on this machine.
    """
    check_run_weights(ctx)
    model = ctx.recipe.model
    if model.backend != "openai":
        check_model_directory(Path(model.path))
    checkpoint_id = fingerprint("checkpoint", digest := model_identity(model))
    config = resolved(ctx.recipe)
    state = run_state(ctx.store, ctx.run_id)
    status: Status = "evaluating" if evaluates else "collecting" if collects else "running"
    end_time: datetime | None = None
    if state is not None and (evaluates or collects):
        # Neither an evaluation nor a collection changes how far a run goes or how it ended.
        status, end_time, config["iterations"] = state.status, state.finished_at, state.iterations
    now = datetime.now(UTC)
    general = [] if evaluates or collects else _general_data_rows(ctx)
    # A run that is known keeps what it began with.
    sandboxes = {} if state else await asyncio.to_thread(_sandbox_levels, ctx)
    run = run_rows(
        ctx.run_id,
        recipe=ctx.recipe.name,
        method=ctx.recipe.method,
        config=config,
        versions={**await asyncio.to_thread(versions), "bfloat16": bfloat16_hardware() or "not fast here", **sandboxes},
        workspace=str(ctx.root),
        status=status,
        started_at=now,
        finished_at=end_time,
    )
    base_model = checkpoint_rows(
        checkpoint_id,
        path=model.label,
        weights_sha256=digest,
        config={},
        # If the run goes on from another one, its model is a checkpoint of that run.
        parent_id=find_checkpoint_by_weights(ctx.store, digest),
    )
    models = [base_model]
    teacher = teacher_of(ctx.recipe)
    if teacher is not None:
        models.append(
            checkpoint_rows(
                teacher.id,
                path=str(teacher.path),
                weights_sha256=teacher.weights_sha256,
                config={},
                parent_id=find_checkpoint_by_weights(ctx.store, teacher.weights_sha256),
            )
        )
    inputs = [
        stage_input_rows(ctx.run_id, {FILES_INPUT: _files_hash(ctx.recipe)}),
        *([] if state else _stage_input_rows(ctx, now)),
    ]
    ctx.store.write(merge([run, *models, *inputs, *general]))
    base = ctx.iteration_id(0)
    if iteration_state(ctx.store, base) is None:
        ctx.store.write(iteration_rows(base, run_id=ctx.run_id, iteration=0, checkpoint_out=checkpoint_id))
    return {"run_id": ctx.run_id, "checkpoint": checkpoint_id}


def check_files(ctx: RunContext, stage: Stage) -> None:
    """Raise `ConfigError` if the files that a run reads have changed since it was last started, or,
    for a stage that reads section `data`, the general data.

    A start computes the run's id from the files as they are. A stage finds the run by its id alone,
    and must not go on with other files.
    """
    stored_hash = stored_input_id(ctx.store, ctx.run_id, FILES_INPUT)
    if stored_hash not in (None, _files_hash(ctx.recipe)):
        names = ", ".join([*input_files(ctx.recipe), *prompt_files(ctx.recipe)]) or "its files"
        raise ConfigError(
            f"run {ctx.run_id} cannot go on: {names} are not what they were when it was started; bring them back, "
            "or run the recipe anew"
        )
    if "data" in stage.reads:
        _general_data_rows(ctx)


def _files_hash(recipe: Recipe) -> str:
    return fingerprint(input_files(recipe), prompt_files(recipe))


def total_iterations(store: Store, run_id: str, num_more: int) -> int:
    """Return the total number of iterations that a run is to have when it is asked for `num_more`:
    those that are finished plus `num_more`.

    A run that was interrupted or failed keeps its stored number, whatever `num_more` is.
    """
    num_finished, state = count_finished_iterations(store, run_id), run_state(store, run_id)
    is_under_way = state is not None and state.status in ("running", "failed")
    return state.iterations if state is not None and is_under_way else num_finished + num_more


async def begin_iteration(ctx: RunContext, iteration: int) -> None:
    """Store that an iteration is running; a finished iteration stays finished."""
    with snapshot(ctx.store) as state:
        snapshot_ctx, iteration_id = dataclasses.replace(ctx, store=state), ctx.iteration_id(iteration)
        if iteration_state(state, iteration_id) is not None:
            return
        policy, collector = snapshot_ctx.policy(iteration), snapshot_ctx.collector(iteration)
        state.write(
            iteration_rows(
                iteration_id,
                run_id=ctx.run_id,
                iteration=iteration,
                checkpoint_in=policy.id,
                collected_by=None if collector.role == "actor" else collector.id,
            )
        )


async def end_iteration(ctx: RunContext, iteration: int) -> None:
    """Store that an iteration is finished; one that was finished before keeps its time."""
    iteration_id = ctx.iteration_id(iteration)
    state = iteration_state(ctx.store, iteration_id)
    if state is None or state.status != "finished":
        ctx.store.update("iteration", {"iteration_id": iteration_id, "status": "finished", "finished_at": _now()})


async def finish_run(ctx: RunContext, status: Literal["finished", "failed"], *, evaluates: bool = False) -> None:
    """Store how a run ended, and when; with `evaluates`, do nothing unless the run was only an
    evaluation.
    """
    state = run_state(ctx.store, ctx.run_id)
    if evaluates and state is not None and state.status != "evaluating":
        return
    ctx.store.update("run", {"run_id": ctx.run_id, "status": status, "finished_at": _now()})


def _sandbox_levels(ctx: RunContext) -> dict[str, str]:
    """Return the sandbox level on this machine of each world that runs a model's code, by `sandbox
    of NAME`.
    """
    levels = {}
    for name, world in ctx.recipe.worlds().items():
        if registry.runs_code(world.environment.name):
            with closing(ctx.make_environment(name)) as env:
                if level := env.sandbox():
                    levels[f"sandbox of {env.name}"] = level
    return levels


def _stage_input_rows(ctx: RunContext, now: datetime) -> list[Rows]:
    """Return the rows of the stage inputs of a new run; none for a run that uses the experience of
    a pool.
    """
    recipe = ctx.recipe
    if recipe.compare.pool:
        return []
    configs = recipe.own_models()
    weights: dict[ModelRole, str] = {role: model_identity(model) for role, model in configs.items() if role != "actor"}
    started_at = ctx.started_at() or now
    settings, files, prompts = identity_settings(recipe, ctx.method), input_files(recipe), prompt_files(recipe)
    hashes = input_hashes(recipe, settings, weights=weights, files=files, prompts=prompts, started_at=started_at)
    inputs = {stage: key for stage, key in hashes.items() if stage.partition("/")[0] in ctx.method.shared_stages}
    return [stage_input_rows(ctx.run_id, inputs)]


# The hash is a row and not part of the id, which would have changed the ids of all runs with
# general data.
def _general_data_rows(ctx: RunContext) -> list[Rows]:
    """Return the row with the hash of the file of general data; none if the recipe uses no such
    file.

    Raises `ConfigError` if the stored hash is another one: the run's id has only the file's name.
    """
    general = ctx.recipe.data.general
    if not general.share:
        return []
    content = content_hash(Path(general.file), ctx.recipe)
    stored_hash = stored_input_id(ctx.store, ctx.run_id, DATASETS_INPUT)
    if stored_hash not in (None, content):
        raise ConfigError(
            f"data.general.file: {general.file} is not what it was when run {ctx.run_id} began to train; bring its "
            "contents back, or give other conversations a file of another name"
        )
    return [stage_input_rows(ctx.run_id, {DATASETS_INPUT: content})]


def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that a run depends on, the commit of the
    code where it is known, and what the machine is.
    """
    return {
        "python": platform.python_version(),
        "agentr": version(DISTRIBUTION),
        **{name: version(name) for name in PACKAGES},
        **machine_facts(),
    }


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)
