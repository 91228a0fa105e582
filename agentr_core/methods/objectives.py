"""The objectives that come along, as a recipe sets them."""

from __future__ import annotations

from dataclasses import replace

from agentr_core.recipes import Recipe
from agentr_core.runtime.description import Objective
from agentr_core.training.job import PreferenceLoss


def supervised(recipe: Recipe, iteration: int, *, anew: bool = False) -> Objective:
    """Return supervised fine-tuning in an iteration, counted from 1.

    Args:
        anew: train the model that the run began with, whatever `training.start_from` says.
    """
    return Objective(
        kind="sft",
        config=recipe.training,
        num_train_epochs=recipe.num_train_epochs(iteration),
        anew=anew or recipe.training.start_from == "base",
    )


def preference(recipe: Recipe, turn: int) -> Objective:
    """Return preference training, where what section `eto.dpo` sets goes before section `training`.

    It goes on from the last policy, whose deeds the pairs are made of and which is its own
    reference.

    Args:
        turn: the number of the iteration among those that train on preferences, from 0.
    """
    dpo = recipe.eto.dpo
    config = replace(  # type: ignore[type-var]
        recipe.training,
        learning_rate=_at(dpo.learning_rate, turn),
        max_tokens=dpo.max_tokens,
        step_tokens=0,
        per_device_train_batch_size=dpo.per_device_train_batch_size,
        gradient_accumulation_steps=dpo.gradient_accumulation_steps,
        lr_scheduler_type=dpo.lr_scheduler_type,
        warmup_ratio=dpo.warmup_ratio,
    )
    loss = PreferenceLoss(
        beta=_at(dpo.beta, turn),
        loss_type=tuple(dpo.loss_type),
        loss_weights=dpo.loss_weights,
        label_smoothing=dpo.label_smoothing,
        ld_alpha=dpo.ld_alpha,
    )
    return Objective(kind="dpo", config=config, num_train_epochs=_at(dpo.num_train_epochs, turn), preference=loss)


def _at(values: tuple[float, ...], turn: int) -> float:
    return values[min(turn, len(values) - 1)]
