"""Check what the stages of a recipe need of models, machine and files, before the first stage
begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from agentr_core import estimates
from agentr_core.environments import registry
from agentr_core.errors import ConfigError, DataFault, EndpointError, ModelDirectoryError, ModelFault, UserError
from agentr_core.estimates import GIB
from agentr_core.methods.table import method_of, plans_of
from agentr_core.models.checkpoint_dir import (
    TWO_TURNS,
    check_model_directory,
    context_length_of,
    has_chat_template,
    template_hint,
)
from agentr_core.models.openai.chat import make_endpoint, served_context_length
from agentr_core.models.vllm.replicas import device_of
from agentr_core.recipes.grpo import on_one_machine
from agentr_core.recipes.models import ModelConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.chat_file import RecordUse, count_ignored_fields, ignored_fields_text, read_chat
from agentr_core.samples.rendering import Renderer, load_renderer, load_tokenizer
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import revision_states
from agentr_core.store.queries.runs import count_trees
from agentr_core.system import gc_paused_for_imports
from agentr_core.texts import faults_message
from agentr_core.training.job import GroupRelative
from agentr_core.types import Message
from tasks.workspaces import find_run, open_store

_ASKED_BY_WORLDS = ("judge", "summariser")
"""The roles of the models that worlds ask."""


@dataclass(slots=True)
class Faults:
    """Everything that prevents a run. `machine` are faults of this machine, which another may not
    have; `notes` are remarks that prevent nothing.
    """

    errors: list[UserError] = field(default_factory=list)
    machine: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect a `UserError` of the block instead of raising it."""
        try:
            yield
        except UserError as error:
            self.errors.append(error)

    def raise_any(self) -> None:
        """Raise all errors and faults as one `ConfigError`; a single error is raised as it is. Do
        nothing if there are none.
        """
        messages = dict.fromkeys([*map(str, self.errors), *self.machine])
        if len(messages) == 1 and self.errors:
            raise self.errors[0]
        if messages:
            raise ConfigError(faults_message(list(messages)))


def model_requirements(recipe: Recipe, faults: Faults, *, trains: bool, asks: bool) -> None:
    """Add to `faults` what is wrong with each model of a recipe: its directory, chat template,
    context, device or server.

    Args:
        trains: whether the actor will be trained.
        asks: whether servers are contacted. If not, a directory may be missing if the shape of its
            model is known.
    """
    for role, model in recipe.own_models().items():
        section = "model" if role == "actor" else f"models.{role}"
        if model.backend == "openai":
            if asks:
                with faults.collected():
                    _ask(model)
            continue
        with faults.collected():
            _check_device(model, section, faults)
        if not asks and weights_missing(model):
            continue
        with faults.collected():
            _check_directory(Path(model.path))
            with faults.collected():
                _check_context(model)
            _check_template(Path(model.path), trains=trains and role == "actor")


def weights_missing(model: ModelConfig) -> bool:
    """Return whether a model has no weights on this machine, though its shape is known."""
    path = Path(model.path)
    if model.backend == "openai" or any(path.glob("*.safetensors")):
        return False
    try:
        estimates.find_shape(path)
    except ModelDirectoryError:
        return False
    return True


def training_requirements(recipe: Recipe, faults: Faults) -> None:
    """Add to `faults` what prevents the trainings of a recipe: unknown names, missing packages or
    devices, adapters that do not fit, too little memory beside servers.
    """
    # Torch and PEFT take seconds to import, and an evaluation needs neither.
    from agentr_core.training.parent import adapter_faults, mixing_faults
    from agentr_core.training.requirements import PREFERENCE_SECTION, machine_faults, name_faults

    problems: list[str] = []
    for config, section, online in _trainings(recipe):
        problems += name_faults(config, section=section)
        faults.machine += machine_faults(config, online=online)
        with faults.collected():
            path = Path(recipe.model.path)
            directory = path if path.is_dir() else estimates.find_shape(path)
            if (directory / "config.json").is_file() or (directory / "adapter_config.json").is_file():
                problems += adapter_faults(directory, config)
                # Each side of a pair has a row of its own.
                problems += [] if section == PREFERENCE_SECTION else mixing_faults(directory, config)
    if recipe.model.backend == "vllm" and os.environ.get("AGENTR_VLLM") and any(map(_reinforces, _trained(recipe))):
        problems.append(
            "AGENTR_VLLM: group RL replaces the weights after each step, and servers of `agentr models serve` may have "
            "other users; unset it, so that the run starts servers of its own"
        )
    for variant in _trained(recipe):
        with faults.collected():
            faults.machine += trainer_memory_faults(variant)
    faults.errors += map(ConfigError, dict.fromkeys(problems))


def file_requirements(recipe: Recipe, faults: Faults) -> None:
    """Add to `faults` the faults of files and runs that a recipe names and that are otherwise read
    only when its data is made.
    """
    files = {variant.data.general.file for variant in _trained(recipe) if variant.data.general.share}
    for file in sorted(files):
        with faults.collected():
            conversations, rejections = read_chat(Path(file))
            if not conversations:
                raise ConfigError(
                    f"data.general.file: {file} has no conversation to train on, and {len(rejections)} of no use; give "
                    "another file, or set data.general.share=0"
                )
            if turns := next((sample.messages for sample in conversations if sample.messages[0].role == "tools"), ()):
                check_prompt(recipe.model, tuple(takewhile(lambda turn: turn.role != "assistant", turns)))
            _note_fields(faults, file, "general", "data.general.file")
    workspace, preferences = Path(recipe.workspace), recipe.eto.preferences
    if recipe.eto.expert.file:
        _note_fields(faults, recipe.eto.expert.file, "expert", "eto.expert.file")
    if preferences.source == "file":
        _note_fields(faults, preferences.file, "pairs", "eto.preferences.file")
    if preferences.source == "trees" and preferences.trees:
        with faults.collected():
            run = find_run(workspace, preferences.trees)
            _check_run(workspace, run, count_trees, "tree for eto.preferences.trees")
    if run := recipe.evaluation.revision_test.states:
        with faults.collected():
            _check_run(workspace, run, revision_states, "state for evaluation.revision_test.states")


def _note_fields(faults: Faults, file: str, use: RecordUse, setting: str) -> None:
    """Add a note on the fields of a file's records that are not read. Records that are not sound
    are reported where the file is read, not here.
    """
    with suppress(UserError):
        if fields := count_ignored_fields(Path(file), use, setting=setting):
            faults.notes.append(f"{setting}: {file}: {ignored_fields_text(fields)}")


def _trained(recipe: Recipe) -> Sequence[Recipe]:
    return method_of(recipe).trained_recipes(recipe)


def _reinforces(recipe: Recipe) -> bool:
    objectives = (plan.training.objective for plan in plans_of(recipe) if plan.training)
    return any(isinstance(objective, GroupRelative) for objective in objectives)


def trainer_memory_faults(recipe: Recipe) -> list[str]:
    """Return a sentence if the trainer of group RL, which uses the first GPUs, has too little
    memory on one of them beside the servers there; an empty list if it may have enough.
    """
    from agentr_core.training.requirements import gpu_memory

    if os.environ.get("AGENTR_VLLM") or not _reinforces(recipe) or not (memory := gpu_memory()):
        return []
    asks = any(registry.asks_models(world.environment.name) for world in recipe.worlds().values())
    roles = {"actor", *(_ASKED_BY_WORLDS if asks else ())}
    served_models = {role: m for role, m in recipe.own_models().items() if role in roles and m.backend == "vllm"}
    # The actor's servers may leave the GPU to the trainer.
    sampling_models = [
        m for role, m in served_models.items() if m.device != "cpu" and not (role == "actor" and m.shares_gpus)
    ]
    ranks = range(on_one_machine(recipe.training).num_processes)
    shares = {
        gpu: sum(m.vllm.gpu_memory_utilization for m in sampling_models if gpu in m.vllm.gpu_numbers) for gpu in ranks
    }
    gpu = max(shares, key=lambda number: shares[number])
    needed_bytes = estimates.min_group_rl_memory(estimates.read_shape(Path(recipe.model.path)), recipe)
    if not shares[gpu] or needed_bytes <= memory * (1 - shares[gpu]):
        return []
    return [
        f"model.vllm.gpus: group RL trains on GPU {gpu} and needs at least {needed_bytes / GIB:.3g} of its "
        f"{memory / GIB:.3g} GiB, and servers take {shares[gpu]:.3g} of them; give these other GPUs, lower "
        "gpu_memory_utilization, or set model.vllm.sleep"
    ]


def _trainings(recipe: Recipe) -> list[tuple[TrainingConfig, str, bool]]:
    """Return each different training of a recipe: its settings, the name of the section that has
    its schedule, and whether it is group RL.
    """
    trainings = [plan.training for variant in _trained(recipe) for plan in plans_of(variant) if plan.training]
    settings = [
        (training.config, training.section, isinstance(training.objective, GroupRelative)) for training in trainings
    ]
    return [entry for number, entry in enumerate(settings) if entry not in settings[:number]]


def _check_device(model: ModelConfig, section: str, faults: Faults) -> None:
    """Add a fault of this machine if it lacks the device of a model."""
    try:
        if model.backend == "vllm":
            if not os.environ.get("AGENTR_VLLM"):
                device_of(model.device)
            return
        with gc_paused_for_imports():
            from agentr_core.models.local.loading import torch_device

        torch_device(model.device, field=f"{section}.device")
    except ConfigError as error:
        faults.machine.append(str(error))


def _check_context(model: ModelConfig) -> None:
    context = context_length_of(Path(model.path), model.context_length)
    if model.backend == "vllm":
        return
    from agentr_core.models.local.loading import attention_of
    from agentr_core.training.parent import text_config

    attention_of(Path(model.path), text_config(Path(model.path)), context)


def _check_directory(path: Path) -> None:
    try:
        check_model_directory(path)
    except ModelDirectoryError as fault:
        lacks_template = path.is_dir() and not has_chat_template(path)
        raise ModelDirectoryError(f"{fault}{template_hint(path) if lacks_template else ''}") from fault


def _check_template(path: Path, *, trains: bool) -> None:
    """Raise `ModelDirectoryError` if the chat template cannot render a first prompt or, with
    `trains`, a conversation of two turns as a sample, or if the tokenizer has no padding token.
    """
    now = datetime.now(UTC)
    try:
        tokenizer = load_tokenizer(path)
        renderer = Renderer(tokenizer, at=now)
        renderer.render_prompt(TWO_TURNS[:1])
        if trains:
            renderer.render_sample(TWO_TURNS)
    except (DataFault, ModelDirectoryError) as fault:
        action = "trained" if trains else "asked"
        message = (
            str(fault) if isinstance(fault, ModelDirectoryError) else f"the model in {path} cannot be {action}: {fault}"
        )
        raise ModelDirectoryError(message + template_hint(path)) from fault
    # TRL's trainers pad rows with this token.
    if trains and (tokenizer.pad_token or tokenizer.eos_token) is None:
        raise ModelDirectoryError(
            f"the tokenizer in {path} has neither pad_token nor eos_token, and trainers need one; add it to its "
            "tokenizer_config.json"
        )


def check_prompt(model: ModelConfig, messages: Sequence[Message]) -> None:
    """Raise `ModelDirectoryError` if the chat template of a model in a directory cannot render the
    first prompt of a world, such as one with tools, and `ConfigError` if that prompt leaves no room
    for a reply. A model on an OpenAI server, which has its own template, is not checked.
    """
    path = Path(model.path)
    if model.backend == "openai" or not path.is_dir():
        return
    try:
        tokens = len(load_renderer(path, at=datetime.now(UTC)).render_prompt(messages))
    except DataFault as fault:
        raise ModelDirectoryError(f"the model in {path} cannot be asked: {fault}") from fault
    room = context_length_of(path, model.context_length)
    if tokens >= room:
        raise ConfigError(
            f"model.context_length: a context of {room:,} tokens has no room for a reply, since what the model reads "
            f"before an instance has {tokens:,}; give more, or name a model with a longer context"
        )


def _ask(model: ModelConfig) -> None:
    try:
        served_context_length(make_endpoint(model.server, os.environ), model.server, model.context_length)
    except ModelFault as error:
        raise EndpointError(str(error)) from None


def _check_run(workspace: Path, run: str, find: Callable[[Store, str], object], entity: str) -> None:
    """Raise `ConfigError` if `find` finds nothing in a run of a workspace. `entity` names what it
    looks for, for the message.
    """
    if not find(open_store(workspace, must_exist=True), run):
        raise ConfigError(f"run {run!r} in {workspace} has no {entity}; `agentr runs -w {workspace}` lists them all")
