"""What would stop a run at once, found before anything is started."""

from __future__ import annotations

from pathlib import Path

from agentr_core.config import Recipe
from agentr_core.models.checkpoint_dir import check_model_directory
from agentr_core.stages.instances import test_instances, training_instances
from tasks.wiring import make_environment, open_store


def check(recipe: Recipe) -> None:
    """Raise `UserError` when the model, the splits or the store of a recipe cannot be used; reads headers only."""
    if recipe.method == "base":
        return
    check_model_directory(Path(recipe.model.path))
    env = make_environment(recipe)
    try:
        training_instances(recipe, env, 1)
        test_instances(recipe, env)
    finally:
        env.close()
    store = open_store(Path(recipe.workspace))
    if store.path.exists():
        with store.reading():
            pass
