"""Faults of a recipe whose fields are each right: parts that do not go together, and secrets.

These rules know no method; `methods.faults` has those that do, and puts all together.
"""

from __future__ import annotations

from collections.abc import Collection

from agentr_core.recipes.agent_r import critique_faults, search_faults, splice_faults
from agentr_core.recipes.environments import (
    WorldConfig,
    action_faults,
    development_faults,
    evaluation_faults,
    instances_faults,
    prompt_faults,
    worlds_faults,
)
from agentr_core.recipes.models import ModelRole, gpu_faults, model_faults, secret_faults
from agentr_core.recipes.recipe import ADAPTER, OPTIONAL, Recipe, served_sampling_faults
from agentr_core.recipes.training import training_faults, vllm_adapter_faults


def secrets_in(recipe: Recipe) -> list[str]:
    """Return one sentence for each secret that is written out in a recipe."""
    return [fault for role, model in recipe.own_models().items() for fault in secret_faults(_section_of(role), model)]


def _section_of(role: ModelRole) -> str:
    return "model" if role == "actor" else f"models.{role}"


def faults_of_sections(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe by the rules for all methods, one sentence each."""
    faults = []
    if not recipe.pairs.alpha:
        faults.append("pairs.alpha: give at least one threshold")
    if not recipe.training.num_train_epochs:
        faults.append("training.num_train_epochs: give at least one number")
    faults += training_faults(recipe.training)
    if recipe.training.max_seconds and recipe.eto.dpo.max_tokens:
        faults.append("eto.dpo.max_tokens: training.max_seconds is a budget already; leave one of the two out")
    if recipe.data.general.share > 0 and not recipe.data.general.file:
        faults.append("data.general.file: a share above 0 needs a file of chat data")
    faults += instances_faults(recipe.instances)
    single = recipe.environment
    faults += prompt_faults("environment", single.prompt, single.transcript)
    faults += action_faults("environment", single.action, single.transcript)
    faults += _faults_of_worlds(recipe)
    faults += search_faults(recipe.search)
    faults += critique_faults(recipe.critique)
    faults += splice_faults(recipe.splice)
    faults += evaluation_faults(recipe.evaluation)
    faults += [
        f"evaluation.sets.{name}.split: {chosen.split!r} is the split that is trained on"
        for world in recipe.worlds().values()
        for name, chosen in world.evaluation.sets.items()
        if chosen.split in _splits_trained_on(world)
    ]
    if recipe.scale.runner == "local" and (recipe.scale.address or recipe.scale.workers):
        faults.append("scale.runner: address and workers belong to a cluster; name dask or ray")
    if recipe.scale.address and recipe.scale.workers:
        faults.append("scale.workers: the cluster at scale.address has the workers it has; leave one of the two out")
    return faults


def _splits_trained_on(recipe: Recipe) -> set[str]:
    """Return the splits of all iterations, also of those by which a run may be continued."""
    instances = recipe.instances
    return {split for first in (1, *instances.from_iteration) for split in instances.of(first).training_splits}


def faults_of_models(recipe: Recipe) -> list[str]:
    """Return what is wrong with the models of a recipe, one sentence each."""
    models = {_section_of(role): model for role, model in recipe.own_models().items()}
    faults = [fault for section, model in models.items() for fault in model_faults(section, model)]
    return [*faults, *gpu_faults(models), *_faults_of_served_adapters(recipe), *served_sampling_faults(recipe)]


def faults_of_teacher(recipe: Recipe, *, collects: bool, online: bool) -> list[str]:
    """Return why a recipe's teacher has nothing to do, or is missing.

    Args:
        collects: a stage of its method collects with a teacher.
        online: an iteration is group RL.
    """
    if recipe.models.teacher is None:
        return ["teacher_iterations: name models.teacher, or leave it out"] if recipe.teacher_iterations else []
    if collects:
        return []
    reason = (
        "reinforcement learning trains on what the trained model samples itself, with the log-probabilities of its own "
        "tokens, which another model's text has not; distil with method agent-r or eto first, and go on from that run "
        "with model.from_run"
        if online
        else f"no stage of method {recipe.method} with these settings collects with a model; leave it out"
    )
    return [f"models.teacher: {reason}"]


def faults_of_choice(recipe: Recipe, *, goes_round: bool) -> list[str]:
    """Return what is wrong with how a run chooses the checkpoint that it goes on from."""
    best = recipe.promote == "best"
    if best and not goes_round:
        return [f"promote: method {recipe.method} has no iterations that go on from one another; leave it out"]
    asking = {"promote": best, "grpo.eval_steps": recipe.grpo.eval_steps > 0}
    faults = development_faults(recipe.evaluation, readers=[field for field, asks in asking.items() if asks])
    faults += [
        f"evaluation.sets.{name}.split: {chosen.split!r} is the split that is tested, and no development set"
        for world in recipe.worlds().values()
        for name, chosen in world.evaluation.sets.items()
        if name == recipe.evaluation.development and chosen.split == world.instances.test
    ]
    return faults


def _faults_of_worlds(recipe: Recipe) -> list[str]:
    faults = worlds_faults(recipe.environments)
    for name, chosen in recipe.evaluation.sets.items():
        where = f"evaluation.sets.{name}.environment"
        if not recipe.environments and chosen.environment:
            faults.append(f"{where}: belongs to a recipe of several environments; leave it out")
        elif name in recipe.environments:
            faults.append(f"evaluation.sets.{name}: a world has this name; choose another")
        elif recipe.environments and chosen.environment not in recipe.environments:
            faults.append(f"{where}: say whose split it is, one of {', '.join(recipe.environments)}")
    if not recipe.environments:
        return faults
    faults += [
        f"{file}: a file is of one world, and environments names several; leave it out"
        for file, is_set in (
            ("eto.expert.file", recipe.eto.expert.file),
            ("eto.preferences.file", recipe.eto.preferences.file),
        )
        if is_set
    ]
    return faults


def _faults_of_served_adapters(recipe: Recipe) -> list[str]:
    """Return why vLLM could not serve the run's checkpoints, which would otherwise end it after its
    first training.
    """
    training, model = recipe.training, recipe.model
    if model.backend != "vllm" or not training.lora_r or training.publish != "adapter":
        return []
    faults = vllm_adapter_faults(training)
    if model.dtype == "float32" and model.device != "cpu":
        faults.append(
            "model.dtype: on a GPU vLLM serves adapters in bfloat16 only; set model.dtype=bfloat16, or "
            "training.publish=merged, or model.device=cpu where there is no GPU"
        )
    return faults


def unread_sections(recipe: Recipe, method: str, read: Collection[str]) -> list[str]:
    """Return a sentence for each changed section that the recipe's method does not read."""
    plain = ADAPTER.validate_python({"name": recipe.name})
    unread = [
        section for section in OPTIONAL if section not in read and getattr(recipe, section) != getattr(plain, section)
    ]
    untouched = WorldConfig()
    unread += [
        f"environments.{name}.{field}"
        for name, world in recipe.environments.items()
        for field, section in (("search", "search"), ("explore", "eto"))
        if section not in read and getattr(world, field) != getattr(untouched, field)
    ]
    return [f"{section}: belongs to another method than {method}; leave it out" for section in unread]
