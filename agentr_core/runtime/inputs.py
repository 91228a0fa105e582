"""What determines the replies of a stage, as one hash: runs in which it is equal reuse each other's
work.

A reply depends on the policy, the iteration and the instance as well; these are told apart where
rows are copied. What only later stages read is left out: how a model is trained, evaluated and
reported does not change a tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from agentr_core.environments import registry
from agentr_core.errors import DataFileError
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, prints_date
from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.texts import placed
from agentr_core.types import NO_LIMITS
from agentr_core.writing import content_sha256

VERSION = 1
"""Increase it when the same inputs would give different replies."""

SHIPPED = {
    "data/textcraft/recipes.json": "2da02ba812aaa3318174c333b6edb3343af076fe5cd8084e90f0ffb691f36298",
    "data/textcraft/split.json": "3cc34323c8a308e0c74e21c4dfa09c5ab828e29b86ee36b603f3d26614613e9e",
    "data/webshop/items_shuffle.json": "d6ead415b67e6680e0b5bf306eee48ecce27076f741d8832070e72f232a66f8d",
    "data/webshop/items_ins_v2.json": "c701559a14078ec97701c8b89d2267e55c91b7499d4c2d0317906c703eabe006",
    "data/webshop/items_human_ins.json": "261b316f72b8c67fd97b619b1db71e815206fd35ac784cf85bdca12017757ffa",
    "data/reasoning/numbers": "8b0206c773b089bf",
    "data/reasoning/encyclopaedia": "a08506fb4d3c1c9f",
    "data/reasoning/corpus.jsonl": "b4108e3bef7139bc99479ee9eeff0f7ef63da0641b03d9e41598d35864086e15",
}
"""The contents of shipped files that are in no id: those that all runs played from before ids said
which files they are. Never change an entry: other contents make other runs by themselves.
"""


def input_ids(
    recipe: Recipe,
    asked: Mapping[str, Any],
    *,
    weights: Mapping[ModelRole, str],
    files: Mapping[str, str],
    prompts: Mapping[str, str],
    at: datetime,
) -> dict[str, str]:
    """Return, for each stage, the hash of what determines its replies.

    Args:
        asked: what the recipe asks for, as plain data (`start.asked_for`).
        weights: the identities of the models, by role.
        files: the SHA-256 of files that the recipe names.
        prompts: the SHA-256 of files of prompts (`prompts.prompt_files`).
        at: when the run starts; its date counts if a chat template prints it.
    """

    def model(role: ModelRole) -> tuple[Any, ...]:
        config = recipe.model_of(role)
        plain = asked["model"] if config is recipe.model else asked["models"][role]
        if config.backend == "openai":
            return plain, weights.get(role, "")
        path = Path(config.path)
        # The actor's weights are those of the checkpoint that acts.
        own = "" if config is recipe.model else weights[role]
        return plain, own, behaviour_files_sha256(path), at.date().isoformat() if prints_date(path) else ""

    world, train = _worlds(recipe, asked)
    besides = _besides(recipe, model, files, prompts)
    acting = VERSION, recipe.seed, world, model("actor"), recipe.context, train, *besides
    collect = fingerprint("collect", *acting, asked["search"])
    eto = asked["eto"]
    grpo = recipe.grpo
    # Without them, ids stay what they were before these became part of them.
    more = [value for value in (grpo.stop, grpo.limits) if value not in ((), NO_LIMITS)]
    limits = grpo.max_steps, grpo.max_new_tokens, grpo.repeats, *more
    forks = eto["preferences"]["level"], eto["preferences"]["forced_steps"]
    # Episodes that go on from the expert's steps read what the editor wrote there.
    edited = [model("editor")] if recipe.eto.expert.thoughts.enabled else []
    return {
        "collect": collect,
        "critique": fingerprint("critique", collect, model("judge"), asked["critique"]),
        "rollout": fingerprint("rollout", *acting, recipe.et_agent.curriculum.rollouts, limits),
        "explore": fingerprint(
            "explore", *acting, eto["explore"], eto["expert"], files, eto["phases"], *forks, *edited
        ),
    }


def _besides(
    recipe: Recipe,
    model: Callable[[ModelRole], tuple[Any, ...]],
    files: Mapping[str, str],
    prompts: Mapping[str, str],
) -> Iterator[Any]:
    """Yield what else decides how a recipe acts, apart from the actor and its world."""
    if any(registry.asks_models(one.environment.name) for one in recipe.worlds().values()):
        # Rewards and observations may be made with these models as well.
        yield {role: model(role) for role in recipe.own_models() if role != "actor"}
    elif recipe.models.teacher is not None:
        yield {"teacher": model("teacher")}
    if recipe.models.teacher is not None:
        yield recipe.teacher_iterations
    if prompts:
        yield prompts
    if played := {name: files[name] for name in played_from(recipe) if name in files}:
        yield played


def played_from(recipe: Recipe) -> dict[str, str]:
    """Return the files and folders that the worlds of a recipe play from, by their names in ids."""
    found: dict[str, str] = {}
    for world in recipe.worlds().values():
        found |= registry.files_of(world.environment.name, world.environment.options, os.environ)
    return found


def input_files(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of the files and folders that a recipe plays from or trains on, by their
    names in ids. Raises `DataFileError` if one cannot be read.
    """
    launch = recipe.training.launch
    # The name of a shipped file of settings is no path.
    settings = launch.deepspeed if launch and Path(launch.deepspeed).is_file() else ""
    named = (recipe.eto.expert.file, recipe.eto.preferences.file, settings)
    files = {**{name: name for name in named if name}, **played_from(recipe)}
    found = {name: contents(Path(path), recipe) for name, path in files.items()}
    return {name: sha256 for name, sha256 in found.items() if SHIPPED.get(name) != sha256}


def contents(path: Path, recipe: Recipe) -> str:
    """Return the SHA-256 of a file or folder that a recipe names, with a memory in its workspace.
    Raises `DataFileError` if it cannot be read.
    """
    try:
        return content_sha256(path, Path(recipe.workspace) / "cache")
    except OSError as error:
        raise DataFileError(f"the recipe's file {placed(path)} cannot be read: {error.strerror or error}") from error


def _worlds(recipe: Recipe, asked: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what a recipe asks of its world, or of all its worlds, and the splits from which it
    collects.
    """
    versions = {
        name: registry.version_of(world.environment.name, world.environment.options)
        for name, world in recipe.worlds().items()
    }
    if not recipe.environments:
        return (asked["environment"], versions[recipe.environment.name]), asked["instances"]["train"]
    acting = ("name", "options", "transcript", "prompt", "action", "search", "explore")
    worlds = {
        name: {field: world[field] for field in acting if field in world}
        for name, world in asked["environments"].items()
    }
    return (worlds, versions), {name: world["instances"]["train"] for name, world in asked["environments"].items()}
