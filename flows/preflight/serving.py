"""Check whether the GPUs have room for all model servers that run at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import steps_may_ask
from agentr_core.methods.table import plans_of
from agentr_core.models.vllm.replicas import device_of
from agentr_core.recipes.models import ModelConfig, ModelRole
from agentr_core.recipes.recipe import Recipe

_ASKED_BY_STEPS = "summariser"
"""The role of the model that is called during an episode's steps, to summarise a long history."""
_ASKED_BY_STAGES = ("reflector", "editor")
"""The roles of the models that a stage calls while it lets the policy play."""


def crowded_gpus(recipe: Recipe, env: Environment, *, trains: bool) -> list[str]:
    """Return a sentence for each model whose servers, with those that run at the same time, take
    more than the whole memory of a GPU, for a recipe of one world; an empty list if all fit. Models
    that are called one after the other may share GPUs.

    `trains` says whether all stages of the recipe run, or only an evaluation of its actor.
    """
    if os.environ.get("AGENTR_VLLM"):
        return []
    concurrent_roles = list(_concurrent_roles(recipe, env, trains=trains))
    problems: list[str] = []
    players: tuple[ModelRole, ...] = ("actor", "teacher") if trains and recipe.models.teacher else ("actor",)
    for player in players:
        problems += _crowded(recipe, (player, *concurrent_roles))
    return list(dict.fromkeys(problems))


def _concurrent_roles(recipe: Recipe, env: Environment, *, trains: bool) -> Iterator[ModelRole]:
    """Yield the roles whose models may be called while another model plays."""
    grader = env.grader.asks if env.grader is not None else None
    stages = [stage for plan in plans_of(recipe) for stage in plan.stages] if trains else []
    stage_roles = {role for stage in stages if "actor" in stage.roles for role in stage.roles}
    for role in recipe.own_models():
        by_world = role == grader or (role == _ASKED_BY_STEPS and steps_may_ask(env))
        if by_world or (role in _ASKED_BY_STAGES and role in stage_roles):
            yield role


def _crowded(recipe: Recipe, roles: Sequence[ModelRole]) -> list[str]:
    """Return a sentence for each model that does not fit on its GPUs with those before it in
    `roles`. All of these models run at the same time; the first role is the player's.
    """
    models = recipe.own_models()
    gpu_models: dict[str, ModelConfig] = {}
    problems = []
    for number, role in enumerate(roles):
        section, model = "model" if role == "actor" else f"models.{role}", models[role]
        # Identical models share a server, except with the player.
        shared = model in [models[other] for other in roles[1:number]]
        if not shared and _on_gpu(model):
            problems += _gpu_conflicts(section, model, gpu_models)
            gpu_models[section] = model
    return problems


def _gpu_conflicts(section: str, model: ModelConfig, gpu_models: Mapping[str, ModelConfig]) -> list[str]:
    for gpu in model.vllm.gpu_numbers:
        sections = [name for name, other in gpu_models.items() if gpu in other.vllm.gpu_numbers]
        shares = [gpu_models[name].vllm.gpu_memory_utilization for name in sections]
        if sections and sum(shares, model.vllm.gpu_memory_utilization) > 1:
            return [
                f"{section}.vllm.gpus: its servers and those of {' and '.join(sections)} are up at once, and both want "
                f"more than all memory of GPU {gpu}; name other GPUs, or lower {section}.vllm.gpu_memory_utilization"
            ]
    return []


def _on_gpu(model: ModelConfig) -> bool:
    return model.backend == "vllm" and (model.device == "cuda" or device_of(model.device) == "cuda")
