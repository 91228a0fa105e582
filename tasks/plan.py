"""What a recipe would run: the stages in their order, and the fields that reach each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentr_core.config import Recipe, resolved
from agentr_core.stages.instances import test_instances, training_instances
from agentr_core.stages.start import run_id_of
from tasks.wiring import load_recipe, make_environment, open_store

_FIELDS: dict[str, tuple[str, ...]] = {
    "evaluate base": ("model", "evaluation"),
    "collect": ("environment", "model", "instances", "search", "errors", "scale"),
    "critique": ("model", "models", "pairs", "critique"),
    "splice": ("environment", "splice"),
    "dataset": ("data",),
    "train": ("training",),
    "evaluate": ("model", "evaluation", "scale"),
}


def describe(path: Path, overrides: Sequence[str]) -> str:
    """Return the plan of a recipe as text. Raises `UserError` for what would stop the run at once."""
    recipe = load_recipe(path, list(overrides))
    plain = resolved(recipe)
    if recipe.method == "base":
        return "\n".join([f"recipe {recipe.name}: make a base model", *_section("pretrain", ("base",), plain)])
    env = make_environment(recipe)
    try:
        train, test = len(training_instances(recipe, env, 1)), len(test_instances(recipe, env))
    finally:
        env.close()
    search = recipe.search
    most = train * search.dives * search.width * (search.depth + 1)
    lines = [
        f"recipe {recipe.name}: Agent-R, {recipe.iterations} iterations, run {run_id_of(recipe)} in {recipe.workspace}",
        f"each iteration: {train} trees (at most {most} replies), then {test} held-out episodes",
        f"alpha by iteration: {', '.join(f'{recipe.alpha(i):g}' for i in range(1, recipe.iterations + 1))}",
        f"already done: {_done(recipe)}",
    ]
    for stage, sections in _FIELDS.items():
        lines += _section(stage, sections, plain)
    return "\n".join(lines)


def _section(stage: str, sections: tuple[str, ...], plain: dict[str, Any]) -> list[str]:
    fields = [
        f"  {section}.{key} = {json.dumps(value)}" for section in sections for key, value in plain[section].items()
    ]
    return ["", stage, *fields]


def _done(recipe: Recipe) -> str:
    store = open_store(Path(recipe.workspace))
    if not store.path.exists():
        return "nothing yet"
    frame = store.query(
        "select count(*) as n from iteration where run_id = ? and iteration > 0 and status = 'finished'",
        [run_id_of(recipe)],
    )
    return f"{int(frame['n'][0])} iterations"
