"""What determines the replies of a stage, as one hash: runs in which it is equal reuse each other's
work.

A reply depends on the policy, the iteration and the instance as well; these are told apart where
rows are copied. What only later stages read is left out: how a model is trained, evaluated and
reported does not change a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from agentr_core.environments import registry
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, prints_date
from agentr_core.recipes import ModelRole, Recipe

VERSION = 1
"""Increase it when the same inputs would give different replies."""


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
    # Without stop strings, ids stay what they were before stop strings became part of them.
    limits = grpo.max_steps, grpo.max_new_tokens, grpo.repeats, *([grpo.stop] if grpo.stop else [])
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
    if played := {name: files[name] for name in played_from(recipe)}:
        yield played


def played_from(recipe: Recipe) -> Iterator[str]:
    """Yield the user's files and folders that the worlds of a recipe play from."""
    for world in recipe.worlds().values():
        yield from registry.files_of(world.environment.name, world.environment.options)


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
