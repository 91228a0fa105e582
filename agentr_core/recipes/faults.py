"""Faults of a recipe whose fields are each right: parts that do not go together, and secrets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.recipes.agent_r import critique_faults, search_faults
from agentr_core.recipes.environments import WorldConfig, action_faults, prompt_faults, worlds_faults
from agentr_core.recipes.evaluation import development_faults, evaluation_faults
from agentr_core.recipes.execution import ScaleConfig
from agentr_core.recipes.instances import instances_faults
from agentr_core.recipes.models import ModelRole, gpu_faults, model_faults, secret_faults
from agentr_core.recipes.recipe import ADAPTER, OPTIONAL, Recipe
from agentr_core.recipes.served import served_sampling_faults
from agentr_core.recipes.splicing import splice_faults
from agentr_core.recipes.training import (
    UNREAD,
    TrainingConfig,
    sharing_faults,
    training_faults,
    vllm_adapter_faults,
)


def secrets_in(recipe: Recipe) -> list[str]:
    """Return one sentence for each secret that is written out in a recipe."""
    return [fault for role, model in recipe.own_models().items() for fault in secret_faults(_section_of(role), model)]


def _section_of(role: ModelRole) -> str:
    return "model" if role == "actor" else f"models.{role}"


def faults_of(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe as a whole, one sentence each: by the rules for all
    methods and for its own.
    """
    # Methods are a layer above recipes; the table imports one only when it is asked for.
    from agentr_core.methods.table import SHIPPED, method_of

    if faults := faults_of_method(recipe.method):
        return faults + _faults_of_models(recipe) + _faults_of_sections(recipe)
    method = method_of(recipe)
    faults = _faults_of_models(recipe)
    faults += _foreign_sections(recipe, method.name, method.sections)
    faults += method.faults(recipe)
    if not faults or recipe.method in SHIPPED:
        faults += _unread_settings(recipe)
    # The plans go through both lists.
    if not faults and recipe.pairs.alpha and recipe.training.num_train_epochs:
        faults += _faults_of_plans(recipe)
    return faults + _faults_of_sections(recipe) + _faults_of_choice(recipe, goes_round=method.flow == "flywheel")


def faults_of_method(name: Any) -> list[str]:
    """Return why a recipe's method cannot be had, as one sentence; none where it can, or where the
    recipe names it by something other than a text.
    """
    from agentr_core.methods.table import method_named

    try:
        if isinstance(name, str):
            method_named(name)
    except ConfigError as error:
        return [f"method: {error}"]
    return []


def _faults_of_sections(recipe: Recipe) -> list[str]:
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
    return faults + _faults_of_scale(recipe.scale)


def _splits_trained_on(recipe: Recipe) -> set[str]:
    """Return the splits of all iterations, also of those by which a run may be continued."""
    instances = recipe.instances
    return {split for first in (1, *instances.from_iteration) for split in instances.of(first).training_splits}


def _faults_of_models(recipe: Recipe) -> list[str]:
    models = {_section_of(role): model for role, model in recipe.own_models().items()}
    faults = [fault for section, model in models.items() for fault in model_faults(section, model)]
    return [*faults, *gpu_faults(models), *_faults_of_served_adapters(recipe), *served_sampling_faults(recipe)]


def _faults_of_plans(recipe: Recipe) -> list[str]:
    """Return what is wrong with a teacher and with a sampler that sleeps, and why processes cannot
    share the steps of a training; the recipe must be right otherwise.
    """
    from agentr_core.methods.table import method_of, plans_of

    # The stages of a comparison depend on its arms, which are not settled yet.
    plans = [] if method_of(recipe).flow == "compare" else plans_of(recipe)
    roles = {role for plan in plans for stage in plan.stages for role in stage.roles}
    rows = {plan.training.objective.rows for plan in plans if plan.training is not None}
    faults = _faults_of_teacher(recipe, collects=not plans or "teacher" in roles, online="episodes" in rows)
    if plans and recipe.model.vllm.sleep and "episodes" not in rows:
        faults.append(
            "model.vllm.sleep: only group RL takes turns with its sampler, and no iteration here is group RL; leave it "
            "out, since servers end before any other training begins"
        )
    # Group RL divides each step by episodes. A comparison always trains on datasets.
    return faults if rows == {"episodes"} else faults + sharing_faults(recipe.training)


def _unread_settings(recipe: Recipe) -> list[str]:
    """Return a sentence for each setting of section `training` that none of a recipe's trainings
    reads. A comparison's arms share theirs, and each reads what it needs.
    """
    trainings, plain, faults = _trainings(recipe), TrainingConfig(), []
    for name, value in vars(recipe.training).items():
        whys = [why_unread(name, value, training) for training in trainings]
        if value != getattr(plain, name) and whys and all(whys):
            faults.append(f"training.{name}: {' and '.join(dict.fromkeys(whys))}; leave it out")
    epochs = recipe.training.num_train_epochs
    whys = [why_unread("num_train_epochs", epochs, training) for training in trainings[len(epochs) - 1 :]]
    # One number says nothing of a single iteration, and the default has numbers to spare.
    if not faults and len(epochs) > 1 and epochs != plain.num_train_epochs and whys and all(whys):
        faults.append(
            f"training.num_train_epochs: its last number is for iteration {len(epochs)} and later ones, where "
            f"{' and '.join(dict.fromkeys(whys))}; leave it out"
        )
    return faults


def _trainings(recipe: Recipe) -> list[Any]:
    """Return the training of each of a recipe's first iterations, after which all are alike; none
    where a recipe has other faults by which they cannot be planned.
    """
    from agentr_core.methods.table import method_of, plans_of

    method = method_of(recipe)
    if method.flow == "compare":
        return []
    try:
        return [plan.training for plan in plans_of(recipe) if plan.training is not None]
    except IndexError:
        # A list without a number for an iteration, which is told by itself.
        return []


def why_unread(name: str, value: Any, training: Any) -> str:
    """Return why a training does not read a field of section `training`; empty if it does.

    Args:
        value: the recipe's; that of `training.config` differs where another section replaces it.
    """
    kind, section = training.objective.kind, training.section if training.section != "training" else "grpo"
    if name == "start_from":
        return "" if value != "base" or training.anew else "it goes on from the policy so far"
    if name in UNREAD.get(kind, {}):
        return UNREAD[kind][name]
    if getattr(training.config, name) == value:
        return ""
    if name == "lr_scheduler_kwargs":
        return f"{section}.lr_scheduler_type replaces the schedule that they belong to"
    return f"{section}.{name} takes its place"


def _faults_of_teacher(recipe: Recipe, *, collects: bool, online: bool) -> list[str]:
    if recipe.models.teacher is None:
        return ["teacher_iterations: name models.teacher, or leave it out"] if recipe.teacher_iterations else []
    if collects:
        return []
    why = (
        "reinforcement learning trains on what the trained model samples itself, with the log-probabilities of its own "
        "tokens, which another model's text has not; distil with method agent-r or eto first, and go on from that run "
        "with model.from_run"
        if online
        else f"no stage of method {recipe.method} with these settings collects with a model; leave it out"
    )
    return [f"models.teacher: {why}"]


def _faults_of_scale(scale: ScaleConfig) -> list[str]:
    faults = []
    if scale.runner == "local" and (scale.address or scale.workers):
        faults.append("scale.runner: address and workers belong to a cluster; name dask or ray")
    if scale.address and scale.workers:
        faults.append("scale.workers: the cluster at scale.address has the workers it has; leave one of the two out")
    return faults


def _faults_of_choice(recipe: Recipe, *, goes_round: bool) -> list[str]:
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
        for file, named in (
            ("eto.expert.file", recipe.eto.expert.file),
            ("eto.preferences.file", recipe.eto.preferences.file),
        )
        if named
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


def _foreign_sections(recipe: Recipe, method: str, read: Collection[str]) -> list[str]:
    """Return a sentence for each changed section that the recipe's method does not read."""
    plain = ADAPTER.validate_python({"name": recipe.name})
    foreign = [
        section for section in OPTIONAL if section not in read and getattr(recipe, section) != getattr(plain, section)
    ]
    untouched = WorldConfig()
    foreign += [
        f"environments.{name}.{field}"
        for name, world in recipe.environments.items()
        for field, section in (("search", "search"), ("explore", "eto"))
        if section not in read and getattr(world, field) != getattr(untouched, field)
    ]
    return [f"{section}: belongs to another method than {method}; leave it out" for section in foreign]
