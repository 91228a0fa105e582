"""What a recipe needs of the servers of its models."""

from __future__ import annotations

from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.sampling import SamplingFields


def sampling_sections(recipe: Recipe) -> dict[str, tuple[ModelRole, SamplingFields]]:
    """Return each section of a recipe that asks a model, by name, with the role that it asks; in a
    recipe without a teacher, the actor fills that role. In a flywheel, the model that collects
    fills the roles that have none of their own.
    """
    flywheel, evaluation = recipe.et_agent.flywheel, recipe.evaluation
    return {
        "search": ("teacher", recipe.search),
        "critique": ("judge", recipe.critique),
        "splice.continuation": ("teacher", recipe.splice.continuation),
        "eto.expert.thoughts": ("editor", recipe.eto.expert.thoughts),
        "eto.explore": ("teacher", recipe.eto.explore),
        "grpo": ("actor", recipe.grpo),
        "et_agent.flywheel": ("teacher", flywheel),
        "et_agent.flywheel.reflector": (recipe.asked_beside("reflector"), flywheel.reflector),
        "et_agent.flywheel.editor": (recipe.asked_beside("editor"), flywheel.editor),
        "evaluation": ("actor", evaluation),
        **{f"evaluation.sets.{name}": ("actor", chosen) for name, chosen in evaluation.sets.items()},
    }


def served_sampling_faults(recipe: Recipe) -> list[str]:
    """Return one sentence for each sampling setting that a model's server is not known to accept.

    Backends transformers and vllm accept them all.
    """
    faults = []
    for where, (role, section) in sampling_sections(recipe).items():
        model = recipe.model_of(role)
        if model.backend != "openai":
            continue
        owner = f"models.{role}" if role != "actor" and role in recipe.own_models() else "model"
        faults += [
            f"{where}.{name}: OpenAI's protocol does not know it; leave it out or, if the server has a field of this "
            f"name as vLLM does, name it in {owner}.server.sampling_fields"
            for name in section.beyond_protocol()
            if name not in model.server.sampling_fields
        ]
    return faults
