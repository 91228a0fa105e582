"""One runnable configuration: all sections of a recipe together.

Defaults are the numbers of the Agent-R paper (arXiv 2501.11425, sections 4 and A) unless a field
says otherwise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from agentr_core.fingerprint import absent, later
from agentr_core.recipes.agent_r import CritiqueConfig, PairsConfig, SearchConfig
from agentr_core.recipes.comparison import CompareConfig
from agentr_core.recipes.data import DataConfig
from agentr_core.recipes.eto import EtoConfig
from agentr_core.recipes.evaluation import EvaluationConfig
from agentr_core.recipes.execution import ErrorsConfig, ScaleConfig
from agentr_core.recipes.fields import Count, Natural, record
from agentr_core.recipes.instances import InstancesConfig
from agentr_core.recipes.models import ModelConfig, ModelRole, ModelsConfig
from agentr_core.recipes.secret_values import masked
from agentr_core.recipes.splicing import SpliceConfig
from agentr_core.recipes.training import BaseConfig, TrainingConfig


@record
class EnvironmentConfig:
    """Which environment, and its own options (checked by the environment)."""

    name: str = "textcraft"
    options: dict[str, Any] = field(default_factory=dict)


@record
class Recipe:
    """One runnable configuration."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    method: str = "agent-r"
    """One that comes along (agent-r, eto, compare, base) or that another package adds."""
    description: str = ""
    workspace: str = "runs"
    """Folder of the store, checkpoints and reports."""
    seed: Natural = 0
    iterations: Count = 3
    environment: EnvironmentConfig = EnvironmentConfig()
    model: ModelConfig = ModelConfig()
    """The actor: the model that is improved."""
    models: ModelsConfig = ModelsConfig()
    instances: InstancesConfig = InstancesConfig()
    context: Literal["stop", "window"] = later("stop")
    """What becomes of an episode or a path whose history outgrows the model's context: it ends
    there; or its oldest exchanges are left out of what is read (as published), of which
    instruction, first observation and first reply stay.
    """
    search: SearchConfig = SearchConfig()
    critique: CritiqueConfig = CritiqueConfig()
    pairs: PairsConfig = PairsConfig()
    splice: SpliceConfig = SpliceConfig()
    eto: EtoConfig = EtoConfig()
    compare: CompareConfig = CompareConfig()
    options: dict[str, Any] = later(default_factory=dict)
    """Settings of a method that another package adds, which checks them; those that come along have
    sections.
    """
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    base: BaseConfig = BaseConfig()
    errors: ErrorsConfig = ErrorsConfig()
    scale: ScaleConfig = ScaleConfig()

    def model_of(self, role: ModelRole) -> ModelConfig:
        """Return the model that has a role: its own, or else the actor's."""
        return self.own_models().get(role, self.model)

    def own_models(self) -> dict[ModelRole, ModelConfig]:
        """Return the models named in the recipe, by role; roles that are the actor's are left
        out.
        """
        named: dict[ModelRole, ModelConfig | None] = {
            "actor": self.model,
            "judge": self.models.judge,
            "editor": self.models.editor,
            "summariser": self.models.summariser,
        }
        return {role: model for role, model in named.items() if model is not None}

    def told_apart(self) -> range:
        """Return the iterations, counted from 1, after which nothing new comes: all later ones are
        as the last.
        """
        by_iteration = (self.pairs.alpha, self.training.num_train_epochs, self.eto.phases)
        return range(1, min(self.iterations, max(map(len, by_iteration))) + 1)

    def alpha(self, iteration: int) -> float:
        """Return the least reward of a good path in an iteration, counted from 1."""
        return self.pairs.alpha[min(iteration, len(self.pairs.alpha)) - 1]

    def num_train_epochs(self, iteration: int) -> float:
        """Return the epochs trained in an iteration, counted from 1."""
        return self.training.num_train_epochs[min(iteration, len(self.training.num_train_epochs)) - 1]


ADAPTER = TypeAdapter(Recipe)
OPTIONAL = ("search", "critique", "pairs", "splice", "eto", "compare", "iterations", "options")
"""The sections of a recipe that not every method reads."""


def shown(recipe: Recipe) -> dict[str, Any]:
    """Return what `resolved` returns for the eyes of people: what looks like a secret is masked."""
    plain = resolved(recipe)
    for model in (plain["model"], *filter(None, plain["models"].values())):
        model["server"]["extra_body"] = masked(model["server"]["extra_body"])
    return plain


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data with every default filled in; `parse` of it gives the same
    recipe.
    """
    return dict(ADAPTER.dump_python(recipe, mode="json"))


def identifying(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data without the fields that came later and have their default."""
    plain = resolved(recipe)
    _leave_out(recipe, plain)
    return plain


def _leave_out(section: Any, plain: dict[str, Any]) -> None:
    for name in absent(section):
        del plain[name]
    for name, value in plain.items():
        if dataclasses.is_dataclass(part := getattr(section, name)):
            _leave_out(part, value)


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy of a recipe with top-level fields changed, unchecked: for programs, not for
    user input.
    """
    return dataclasses.replace(recipe, **changes)  # type: ignore[type-var]
