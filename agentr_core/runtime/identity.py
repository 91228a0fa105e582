"""The identity of a recipe's models."""

from __future__ import annotations

from pathlib import Path

from agentr_core.fingerprint import fingerprint
from agentr_core.models.files import weights_sha256
from agentr_core.recipes.models import ModelConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.equipment import Checkpoint


def identity(model: ModelConfig) -> str:
    """Return the identity of a model: the SHA-256 of its weights; for a served one, of its name on
    the server.

    Raises `ModelDirectoryError` when there are no sound weights.
    """
    if model.backend == "openai":
        return fingerprint("served", model.server.model)
    return weights_sha256(Path(model.path))


def teacher_of(recipe: Recipe) -> Checkpoint | None:
    """Return the teacher of a recipe as the store knows it, or None where it has none. Raises as
    `identity`.
    """
    model = recipe.models.teacher
    if model is None:
        return None
    digest = identity(model)
    return Checkpoint(
        id=fingerprint("checkpoint", digest), path=Path(model.label), weights_sha256=digest, role="teacher"
    )
