"""What a recipe would run: the stages in their order, and the fields that reach each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentr_core.arms import arms_of, pool_stages
from agentr_core.config import Recipe, resolved
from agentr_core.stages.instances import test_instances, training_instances
from agentr_core.stages.start import run_id_of
from tasks.wiring import load_recipe, make_environment, open_store

_AGENT_R: dict[str, tuple[str, ...]] = {
    "evaluate base": ("model", "evaluation"),
    "collect": ("environment", "model", "instances", "search", "errors", "scale"),
    "critique": ("model", "models", "pairs", "critique"),
    "splice": ("environment", "splice"),
    "dataset": ("data",),
    "train": ("training",),
    "evaluate": ("model", "evaluation", "scale"),
}
_ETO: dict[str, tuple[str, ...]] = {
    "evaluate base": ("model", "evaluation"),
    "demonstrate": ("environment", "instances", "eto.expert"),
    "explore": ("environment", "model", "instances", "eto.explore", "errors", "scale"),
    "prefer": ("eto.preferences",),
    "dataset": ("data",),
    "train": ("training", "eto.dpo"),
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
    if recipe.method == "compare":
        return "\n".join(_of_comparison(recipe, train, test, plain))
    method, stages = ("ETO", _ETO) if recipe.method == "eto" else ("Agent-R", _AGENT_R)
    where = f"run {run_id_of(recipe)} in {recipe.workspace}"
    lines = [
        f"recipe {recipe.name}: {method}, {recipe.iterations} iterations, {where}",
        *(_of_eto(recipe, train, test) if recipe.method == "eto" else _of_agent_r(recipe, train, test)),
        f"already done: {_done(recipe)}",
    ]
    for stage, sections in stages.items():
        lines += _section(stage, sections, plain)
    return "\n".join(lines)


def _of_agent_r(recipe: Recipe, train: int, test: int) -> list[str]:
    search = recipe.search
    most = train * search.dives * search.width * (search.depth + 1)
    return [
        f"each iteration: {train} trees (at most {most} replies), then {test} held-out episodes",
        f"alpha by iteration: {', '.join(f'{recipe.alpha(i):g}' for i in range(1, recipe.iterations + 1))}",
    ]


def _of_comparison(recipe: Recipe, train: int, test: int, plain: dict[str, Any]) -> list[str]:
    run_id, made = run_id_of(recipe), pool_stages(recipe)
    arms = arms_of(recipe, run_id)
    sections = dict.fromkeys(
        section for stage in made for section in (_AGENT_R | _ETO)[stage] if section not in ("data", "training")
    )
    lines = [
        f"recipe {recipe.name}: comparison of {len(recipe.compare.arms)} arms, run {run_id} in {recipe.workspace}",
        f"the pool: {', '.join(made)} on {train} instances, once",
        f"each arm: {_budget(recipe)}, {len(recipe.compare.seeds)} seeds, then {test} held-out episodes",
        *(f"  {name}: {' '.join(changes)}" for name, changes in recipe.compare.arms.items()),
        f"already done: {_arms_done([run_id_of(arm.recipe) for arm in arms], recipe)} of {len(arms)} trainings",
        *_section("pool", tuple(sections), plain),
    ]
    for stage, names in (("dataset", ("data",)), ("train", _ETO["train"]), ("evaluate", _ETO["evaluate"])):
        lines += _section(stage, names, plain)
    return lines


def _budget(recipe: Recipe) -> str:
    training = recipe.training
    return f"{training.max_tokens} trained tokens" if training.max_tokens else f"{training.max_seconds:g} s of training"


def _of_eto(recipe: Recipe, train: int, test: int) -> list[str]:
    each = recipe.eto.explore.samples + recipe.eto.explore.greedy
    phases = ", ".join(str(recipe.phase(i)) for i in range(1, recipe.iterations + 1))
    return [
        f"iterations: {phases}; each ends with {test} held-out episodes",
        f"an iteration that explores plays {train} instances, {each} times each"
        + (" from every step of the expert" if recipe.eto.preferences.level != "trajectory" else ""),
    ]


def _section(stage: str, sections: tuple[str, ...], plain: dict[str, Any]) -> list[str]:
    fields = []
    for section in sections:
        values = plain
        for part in section.split("."):
            values = values[part]
        fields += [f"  {section}.{key} = {json.dumps(value)}" for key, value in values.items()]
    return ["", stage, *fields]


def _arms_done(runs: Sequence[str], recipe: Recipe) -> int:
    store = open_store(Path(recipe.workspace))
    if not store.path.exists():
        return 0
    frame = store.query(
        "select count(*) as n from run where status = 'finished' and run_id in (select unnest($runs))",
        {"runs": list(runs)},
    )
    return int(frame["n"][0])


def _done(recipe: Recipe) -> str:
    store = open_store(Path(recipe.workspace))
    if not store.path.exists():
        return "nothing yet"
    frame = store.query(
        "select count(*) as n from iteration where run_id = ? and iteration > 0 and status = 'finished'",
        [run_id_of(recipe)],
    )
    return f"{int(frame['n'][0])} iterations"
