"""Check a recipe for everything that would stop its run, before anything is started."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from agentr_core.environment import Environment, checked_text
from agentr_core.environments.native import ACT_TOOL
from agentr_core.episodes.rollout import require_state
from agentr_core.episodes.transcript import (
    Opening,
    instruction_of,
    summarisable_transcript,
    tool_definitions,
    transcript_of,
)
from agentr_core.errors import ConfigError, DataFault, ModelDirectoryError, SandboxError, StoreError
from agentr_core.methods.table import plans_of
from agentr_core.recipes.models import ModelConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.instances import check_no_overlap, held_out_instances, training_instances
from agentr_core.runtime.start import example_ids, opening_of
from agentr_core.types import Instance, Message, Sampling
from flows.preflight.requirements import (
    Faults,
    check_prompt,
    file_requirements,
    model_requirements,
    training_requirements,
)
from flows.preflight.serving import crowded_gpus
from flows.preflight.stops import silent_stops
from tasks.wiring import make_environment
from tasks.workspaces import open_store


def check(recipe: Recipe, *, trains: bool = True) -> Sequence[str]:
    """Check a recipe before it is run. Return notes to show to the user, such as fields of a data
    file that are ignored; raise `UserError` if a stage could not do its work, with a message that
    lists every fault, one sentence each.

    The check covers models, environment, splits, store, files, and the needs of training. Of model
    directories only headers are read; model servers are asked for their list of models, environment
    servers for any answer. `trains` says whether the actor will be trained, which is not possible
    for a model on an OpenAI server.
    """
    faults = faults_of(recipe, trains=trains)
    faults.raise_any()
    return faults.notes


def faults_of(recipe: Recipe, *, trains: bool = True, asks: bool = True) -> Faults:
    """Return the faults and notes that `check` would report.

    Without `asks` no server is contacted, and a missing model is no fault if its shape is known:
    the recipe is then planned for another machine.
    """
    faults = Faults()
    model_requirements(recipe, faults, trains=trains, asks=asks)
    if trains and recipe.model.backend == "openai":
        with faults.collected():
            raise ConfigError(
                f"model {recipe.model.label} is served, and a run trains its actor; name a model directory in "
                "model.path and give the served model a role in models (as models.teacher it collects), or only "
                "evaluate it with `agentr eval`"
            )
    elif trains:
        training_requirements(recipe, faults)
    file_requirements(recipe, faults)
    sound = not faults.errors
    for world in recipe.worlds().values():
        with faults.collected():
            _check_environment(world, faults, trains=trains, asks=asks, prompts=sound)
    with faults.collected():
        store = open_store(Path(recipe.workspace))
        _check_workspace(Path(recipe.workspace))
        if store.path.exists():
            with store.reading():
                pass
    return faults


def _check_environment(recipe: Recipe, faults: Faults, *, trains: bool, asks: bool, prompts: bool) -> None:
    """Raise `UserError` for the first fault of the environment of a recipe of one world, of its
    splits, instances or files; with `prompts`, also if the model cannot read its first prompt. Add
    the level of its sandbox to the notes of `faults`.
    """
    env = make_environment(recipe)
    try:
        checked_text(env.instruction, f"{env.name}: its instruction")
        _check_sandbox(env, faults)
        if asks and env.has(Environment.reach):
            env.reach()
        if recipe.evaluation.repeats:
            require_state(env, "evaluation.repeats")
        if trains:
            _check_judge(env, recipe)
        if problems := crowded_gpus(recipe, env, trains=trains):
            raise ConfigError("; ".join(problems))
        keeps_stop = transcript_of(env).sampling(Sampling()).include_stop
        for section, model in (("model", recipe.model), ("models.teacher", recipe.models.teacher)):
            if keeps_stop and model and model.backend == "openai" and not model.server.continues:
                raise ConfigError(
                    f"in environment {env.name} the model goes on with its own turn and keeps stop strings, which "
                    f"OpenAI's protocol does not know; if the server has vLLM's fields for it, set "
                    f"{section}.server.continues"
                )
        _check_opening(env, opening_of(recipe))
        if recipe.context == "summary":
            summarisable_transcript(env)
        stretches = recipe.instances.changing_iterations(recipe.iterations)
        instances = tuple(itertools.chain(*(training_instances(recipe, env, first) for first in stretches)))
        held_out = held_out_instances(recipe, env)
        _check_examples(recipe, held_out)
        if trains:
            _check_apart(env, instances, held_out)
            for stage in dict.fromkeys(stage for plan in plans_of(recipe) for stage in plan.stages):
                stage.check(recipe, env, instances)
        if prompts:
            first = transcript_of(env).prompt(env, "?", ())
            check_prompt(recipe.model, first)
            if env.has(Environment.relay):
                _check_tools(env, recipe.model, first, faults)
            if silent := silent_stops(recipe, env):
                raise ConfigError("; ".join(silent))
    finally:
        env.close()


def _check_tools(env: Environment, model: ModelConfig, first: tuple[Message, ...], faults: Faults) -> None:
    """Add a note if the chat template of the model cannot render definitions of tools: outside
    agents that offer tools are then refused. Whether they offer any is known only when they play.
    """
    try:
        check_prompt(model, (Message(role="tools", text=tool_definitions([ACT_TOOL])), *first))
    except ModelDirectoryError as error:
        faults.notes.append(f"{env.name}: agents that offer tools are refused: {error.__cause__ or error}")
    except ConfigError:
        # The context is too small for this definition of a tool, which is only an example.
        pass


def _check_sandbox(env: Environment, faults: Faults) -> None:
    """Add a note about the sandbox level at which an environment runs the model's code; if that
    level does not hold here, add a fault of this machine instead.
    """
    try:
        if level := env.sandbox():
            faults.notes.append(f"{env.name}: code of the model runs at sandbox level {level}")
    except SandboxError as error:
        faults.machine.append(str(error))


def _check_judge(env: Environment, recipe: Recipe) -> None:
    """Raise `ConfigError` if the policy would judge its own answers."""
    if env.grader is not None and env.grader.asks == "judge" and recipe.models.judge is None:
        raise ConfigError(
            f"models.judge: environment {env.name} asks it whether answers are right, and without one the policy would "
            "judge its own; name a model, which may be the one that the run begins with"
        )


def _check_apart(env: Environment, train: tuple[Instance, ...], held_out: tuple[Instance, ...]) -> None:
    """Raise `ConfigError` if, judging by names, a training instance is a held-out one or a variant
    of one. First observations are compared later, since resetting a world may take long.
    """
    try:
        check_no_overlap(env, train, held_out, resets=False)
    except DataFault as fault:
        raise ConfigError(str(fault)) from fault


def _check_examples(recipe: Recipe, held_out: Sequence[Instance]) -> None:
    """Raise `ConfigError` if an example in the prompt solves a held-out instance."""
    if leaked_ids := example_ids(recipe) & {instance.key for instance in held_out}:
        raise ConfigError(
            f"environment.prompt.examples_file: its example {min(leaked_ids)} solves an instance that an evaluation "
            "plays; take examples from a training split"
        )


def _check_workspace(folder: Path) -> None:
    """Raise `StoreError` if the folder of a workspace can neither be written to nor be created."""
    ancestor = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        problem = "may not be written to" if ancestor.is_dir() else "is no folder"
        raise StoreError(f"workspace {folder} cannot be used: {ancestor} {problem}; name another one")


def _check_opening(env: Environment, opening: Opening | None) -> None:
    """Raise `ConfigError` if the first prompt of an environment, which may have a transcript of its
    own, lacks what the recipe puts before the first observation.
    """
    if opening is None:
        return
    prompt = "\n".join(message.text for message in transcript_of(env).prompt(env, "?", ()))
    texts = (opening.system, instruction_of(env), *(turn.text for turn in opening.turns))
    if not all(text in prompt for text in texts):
        raise ConfigError(
            f"environment {env.name} has a transcript of its own, which does not say what environment.prompt asks for; "
            "leave it out, or let the transcript use agentr_core.episodes.transcript"
        )
