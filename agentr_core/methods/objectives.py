"""The shipped trainings, as a recipe configures them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.recipes.fields import in_iteration
from agentr_core.recipes.grpo import SCHEDULE, group_faults, grpo_faults, on_one_machine, online_faults
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.place import Acting, Asked, Training
from agentr_core.training.objectives import GroupRelative, Preference, PreferenceLoss, Supervised
from agentr_core.training.zero import offloads, read_zero

_PLAIN = TrainingConfig()
_UNUSED_ONLINE: dict[str, Any] = {
    "num_train_epochs": _PLAIN.num_train_epochs,
    "max_tokens": _PLAIN.max_tokens,
    "max_seconds": _PLAIN.max_seconds,
    "step_tokens": _PLAIN.step_tokens,
}
"""Settings for the length of an offline training: they affect neither group RL nor the ids of its
results."""


def supervised(recipe: Recipe, iteration: int, *, anew: bool = False) -> Training:
    """Return supervised fine-tuning in an iteration, counted from 1.

    Args:
        anew: train the model that the run began with, whatever `training.start_from` says.
    """
    return Training(
        objective=Supervised(),
        config=recipe.training,
        num_train_epochs=recipe.num_train_epochs(iteration),
        anew=anew or recipe.training.start_from == "base",
    )


def reinforced(recipe: Recipe, *, anew: bool = False) -> Training:
    """Return group RL that goes on from the last policy; settings of section `grpo` take precedence
    over section `training`.

    Args:
        anew: train the model that the run began with.
    """
    grpo = recipe.grpo
    own = {name: getattr(grpo, name) for name in SCHEDULE}
    changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    schedule = changes.get("lr_scheduler_type", recipe.training.lr_scheduler_type)
    changes["lr_scheduler_kwargs"] = arguments_for(schedule, recipe.training)
    config = replace(on_one_machine(recipe.training), **_UNUSED_ONLINE, **changes)
    return Training(objective=GroupRelative(grpo=grpo), config=config, anew=anew)


def sampled_groups(recipe: Recipe, test: int) -> dict[str, Asked]:
    """Return the most that group RL asks in an iteration. The development set that it plays between
    its steps is one of the held-out sets, with `test` episodes together.
    """
    grpo, evaluation = recipe.grpo, recipe.evaluation
    number = grpo.steps * grpo.groups * (1 + grpo.resample) * grpo.num_generations
    groups = Asked.episodes(number, steps=grpo.max_steps, most=grpo.max_new_tokens, limits=grpo.limits)
    if not grpo.eval_steps:
        return {"groups": groups}
    plays = test * (grpo.steps // grpo.eval_steps)
    most, limits = evaluation.max_new_tokens, evaluation.limits
    return {
        "groups": groups,
        "validate": Asked.episodes(plays, steps=evaluation.max_steps, most=most, limits=limits),
    }


def acting_in_groups(recipe: Recipe) -> Acting:
    """Return how the policy acts in the episodes of group RL."""
    grpo = recipe.grpo
    sampling = grpo.sampling(temperature=1.0, max_new_tokens=grpo.max_new_tokens)
    return Acting(sampling=sampling, max_steps=grpo.max_steps, repeats=grpo.repeats, limits=grpo.limits)


def swapping_faults(recipe: Recipe) -> list[str]:
    """Return why a step of group RL could not hand its weights to the sampler of the next step, one
    sentence each.
    """
    faults = online_faults(recipe.training)
    if recipe.model.backend == "openai":
        faults.append(
            "model.backend: group RL replaces the weights after each step, which a server that others started does not "
            "allow; set it to vllm or transformers, and name a directory in model.path"
        )
    if recipe.model.takes_turns and _stays(recipe.training):
        faults.append(
            "model.vllm.sleep: DeepSpeed leaves the GPU to nobody unless weights and optimizer are offloaded; set "
            "training.launch.deepspeed=zero3-offload, or training.launch.fsdp=true in its place"
        )
    goes_on = recipe.model.backend == "vllm" or recipe.iterations > 1
    if goes_on and recipe.training.publish == "adapter":
        faults.append(
            "training.publish: a sampler holds an adapter apart from its model, whose weights group RL replaces; leave "
            "it at merged"
        )
    return faults


def _stays(training: TrainingConfig) -> bool:
    """Return whether a trainer cannot leave its GPU to a sampler."""
    launch = training.launch
    if launch is None or not launch.deepspeed:
        return False
    try:
        return not offloads(read_zero(launch.deepspeed))
    except ConfigError:
        # Reported by `requirements`.
        return False


def reinforcing_faults(recipe: Recipe, *, alone: bool) -> list[str]:
    """Return what is wrong with the iterations `rl` of a recipe, one sentence each.

    Args:
        alone: the recipe has no iterations of another kind.
    """
    faults = grpo_faults(recipe.grpo, recipe.training, recipe.data) if alone else group_faults(recipe.grpo)
    faults += swapping_faults(recipe)
    if recipe.context != "stop":
        faults.append("context: an iteration rl trains whole conversations; leave it out")
    return faults


def arguments_for(schedule: str, training: TrainingConfig) -> dict[str, Any]:
    """Return the arguments of a schedule that takes the place of the one in section `training`:
    those given there belong to that one, and stay only where both are the same.
    """
    return training.lr_scheduler_kwargs if schedule == training.lr_scheduler_type else _PLAIN.lr_scheduler_kwargs


def preference(recipe: Recipe, turn: int) -> Training:
    """Return preference training; settings of section `eto.dpo` take precedence over section
    `training`.

    It goes on from the last policy, whose episodes the pairs are made of and which is its own
    reference.

    Args:
        turn: the number of the iteration among those that train on preferences, from 0.
    """
    dpo = recipe.eto.dpo
    config = replace(
        recipe.training,
        learning_rate=in_iteration(dpo.learning_rate, turn + 1),
        max_tokens=dpo.max_tokens,
        step_tokens=0,
        per_device_train_batch_size=dpo.per_device_train_batch_size,
        gradient_accumulation_steps=dpo.gradient_accumulation_steps,
        lr_scheduler_type=dpo.lr_scheduler_type,
        lr_scheduler_kwargs=arguments_for(dpo.lr_scheduler_type, recipe.training),
        warmup_ratio=dpo.warmup_ratio,
    )
    loss = PreferenceLoss(
        beta=in_iteration(dpo.beta, turn + 1),
        loss_type=tuple(dpo.loss_type),
        loss_weights=dpo.loss_weights,
        label_smoothing=dpo.label_smoothing,
        ld_alpha=dpo.ld_alpha,
        max_chosen_drop=dpo.max_chosen_drop,
        on_collapse=dpo.on_collapse,
    )
    return Training(
        objective=Preference(preference=loss),
        config=config,
        section="eto.dpo",
        num_train_epochs=in_iteration(dpo.num_train_epochs, turn + 1),
    )
