"""Read recipes from files and mappings, and check them by the rules of their methods."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.methods.table import SHIPPED, method_named, method_of, plans_of
from agentr_core.recipes import parsing
from agentr_core.recipes.recipe import (
    Recipe,
    faults_of_choice,
    faults_of_models,
    faults_of_scorer,
    faults_of_sections,
    faults_of_teacher,
    unread_sections,
)
from agentr_core.recipes.training import UNREAD_FIELDS, TrainingConfig, sharing_faults
from agentr_core.runtime.context import Training


def load(path: Path, overrides: Sequence[str] = (), *, workspace: str = "") -> Recipe:
    """Return the recipe in a YAML file, checked with `faults_of`. Otherwise like `parsing.load`."""
    return parsing.load(path, overrides, check=faults_of, workspace=workspace)


def parse(
    data: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe", stored: bool = False
) -> Recipe:
    """Return the recipe of a mapping, checked with `faults_of`. Otherwise like `parsing.parse`."""
    return parsing.parse(data, overrides, check=faults_of, source=source, stored=stored)


def faults_of(method_value: Any, recipe: Recipe | None) -> list[str]:
    """Return the faults of a recipe's method and of the recipe as a whole, one sentence each: those
    against the rules of all methods, and against those of its own.

    Args:
        method_value: the value of the field `method`, of any type.
        recipe: the parsed recipe; None if its fields have faults, so that only `method_value` is
            checked.
    """
    faults: list[str] = []
    try:
        # A value that is not a string is reported as a fault of the field itself.
        if isinstance(method_value, str):
            method_named(method_value)
    except ConfigError as error:
        faults.append(f"method: {error}")
    if recipe is None:
        return faults
    if faults:
        return faults + faults_of_models(recipe) + faults_of_sections(recipe)
    method = method_of(recipe)
    faults = faults_of_models(recipe)
    faults += unread_sections(recipe, method.name, method.sections)
    faults += method.faults(recipe)
    if not faults or recipe.method in SHIPPED:
        faults += _unread_settings(recipe)
    # Plans index both lists, so neither may be empty.
    if not faults and recipe.pairs.alpha and recipe.training.num_train_epochs:
        # The stages of a comparison depend on its arms, which are not parsed yet.
        plans = [] if method.flow == "compare" else plans_of(recipe)
        roles = {role for plan in plans for stage in plan.stages for role in stage.roles}
        if recipe.data.scoring:
            faults += _faults_of_scoring(recipe, {stage.name for plan in plans for stage in plan.stages})
        rows = {plan.training.objective.row_type for plan in plans if plan.training is not None}
        faults += faults_of_teacher(recipe, collects=not plans or "teacher" in roles, online="episodes" in rows)
        if plans:
            faults += faults_of_scorer(recipe, online="episodes" in rows)
        if plans and recipe.model.vllm.sleep and "episodes" not in rows:
            faults.append(
                "model.vllm.sleep: only group RL takes turns with its sampler, and no iteration here is group RL; "
                "leave it out, since servers end before any other training begins"
            )
        # These faults are about steps over a dataset. Group RL divides each step by episodes
        # instead; a comparison, whose `rows` are empty here, always trains on datasets.
        if rows != {"episodes"}:
            back = recipe.alarms.reaction == "back"
            faults += sharing_faults(recipe.training, back=back, has_pairs="pairs" in rows)
    return faults + faults_of_sections(recipe) + faults_of_choice(recipe, goes_round=method.flow == "flywheel")


def _faults_of_scoring(recipe: Recipe, stage_names: Set[str]) -> list[str]:
    """Return why a recipe cannot take its rewards from `data.scoring`, as a list of one sentence;
    an empty list if it can.

    Args:
        stage_names: the names of all stages of the recipe; empty for a comparison.
    """
    is_comparison = method_of(recipe).flow == "compare"
    if "reinforce" in stage_names:
        reason = (
            "group RL uses rewards while it samples, and would go by others than the samples beside it; leave it out, "
            "and let the world give other rewards (environment.options)"
        )
    elif not is_comparison and not stage_names & {"collect", "explore", "prefer"}:
        reason = "nothing here is made of what was played before, which alone can be scored again; leave it out"
    elif (is_comparison or "splice" in stage_names) and recipe.splice.mode not in ("blind", "direct"):
        reason = (
            f"splice.mode {recipe.splice.mode} plays its splices and keeps them by the rewards of the world, which the "
            "scoring does not give; set it to blind or direct, or leave data.scoring out"
        )
    elif "prefer" in stage_names and recipe.eto.preferences.source == "file":
        reason = (
            "pairs with eto.preferences.source file are not made of episodes or trees, which alone can be scored "
            "again; leave it out"
        )
    else:
        return []
    return [f"data.scoring: {reason}"]


def _unread_settings(recipe: Recipe) -> list[str]:
    """Return a sentence for each setting of section `training` that differs from its default and is
    read by none of a recipe's trainings.

    A comparison has no such faults: its arms share the section, and each reads a part of it.
    """
    trainings: list[Training] = []
    if method_of(recipe).flow != "compare":
        # A list too short for some iteration is a fault that is reported elsewhere; planning fails.
        with suppress(IndexError):
            trainings = [plan.training for plan in plans_of(recipe) if plan.training is not None]
    defaults, faults = TrainingConfig(), []
    for name, value in vars(recipe.training).items():
        reasons = [unread_reason(name, value, training) for training in trainings]
        if value != getattr(defaults, name) and reasons and all(reasons):
            faults.append(f"training.{name}: {' and '.join(dict.fromkeys(reasons))}; leave it out")
    num_epochs = recipe.training.num_train_epochs
    reasons = [unread_reason("num_train_epochs", num_epochs, training) for training in trainings[len(num_epochs) - 1 :]]
    # A single number is for all iterations, and the default has more numbers than some runs have
    # iterations; neither is a fault.
    if not faults and len(num_epochs) > 1 and num_epochs != defaults.num_train_epochs and reasons and all(reasons):
        faults.append(
            f"training.num_train_epochs: its last number is for iteration {len(num_epochs)} and later ones, where "
            f"{' and '.join(dict.fromkeys(reasons))}; leave it out"
        )
    return faults


def unread_reason(name: str, value: Any, training: Any) -> str:
    """Return why a training does not read a field of section `training`; empty if it does.

    Args:
        value: the field's value in the recipe. `training.config` has another one if a setting of
            another section takes its place.
        training: a `runtime.context.Training`.
    """
    kind, section = training.objective.kind, training.section if training.section != "training" else "grpo"
    if name == "start_from":
        return "" if value != "base" or training.from_base else "it goes on from the policy so far"
    if name in UNREAD_FIELDS.get(kind, {}):
        return UNREAD_FIELDS[kind][name]
    if getattr(training.config, name) == value:
        return ""
    if name == "lr_scheduler_kwargs":
        return f"{section}.lr_scheduler_type replaces the schedule that they belong to"
    return f"{section}.{name} takes its place"
