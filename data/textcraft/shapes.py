"""Print the shape of the official goals and of the worlds made like them, side by side, as a
Markdown table.

    python data/textcraft/shapes.py

`tests/core/test_shaped_worlds.py` holds each number of depths 1 to 3 within a fifth of the official
one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from statistics import fmean

from agentr_core.environments.crafting.game import CraftingProblem, Plan, shortest_plan
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.types import Instance

OFFICIAL = ("train", "test", "rest")
WORLDS = 2000
"""Invented worlds that are counted, as many of each depth."""


def shape(problem: CraftingProblem, best: Plan, lazy: int) -> dict[str, float]:
    """Return what one goal looks like, by the name of the measure; `lazy` are the steps of the lazy
    expert.
    """
    recipes: dict[str, int] = {}
    for recipe in problem.commands:
        recipes[recipe.output] = recipes.get(recipe.output, 0) + 1
    used = [best.recipe_by_item[item] for item in best.craft_counts]
    tags = {i.name for recipe in problem.commands for i in recipe.inputs if i.is_tag}
    return {
        "commands listed": len(problem.commands),
        "ingredients of a command": fmean(len(recipe.inputs) for recipe in problem.commands),
        "count of an ingredient": fmean(i.count for recipe in problem.commands for i in recipe.inputs),
        "pieces that a command makes": fmean(recipe.count for recipe in problem.commands),
        "share with a tag among the ingredients": bool(tags),
        "share with several commands for a needed item": any(recipes[item] > 1 for item in best.craft_counts),
        "different items to craft": len(best.craft_counts),
        "different items to get": len(best.get_counts),
        "crafts": sum(best.craft_counts.values()),
        "share with a part that is crafted twice or more": any(times > 1 for times in best.craft_counts.values()),
        "ingredients of a needed command": fmean(len(recipe.inputs) for recipe in used),
        "steps, fetching everything first": best.num_steps,
        "steps, fetching for the next craft (lazy)": lazy,
    }


def by_depth(env: TextCraft, instances: Iterable[Instance]) -> dict[int, dict[str, float]]:
    """Return the mean of each measure by depth, and as "goals" their number; `env` must have the
    lazy expert.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for instance in instances:
        problem = env.problem(instance)
        best = shortest_plan(problem, {})
        replies = env.expert(instance)
        depth = env.depth(instance)
        if best is not None and replies is not None and depth is not None:
            found.setdefault(depth, []).append(shape(problem, best, len(replies)))
    return {
        depth: {"goals": len(shapes)} | {name: fmean(one[name] for one in shapes) for name in shapes[0]}
        for depth, shapes in sorted(found.items())
    }


def official(env: TextCraft) -> dict[int, dict[str, float]]:
    """Return the shape of all official goals by depth."""
    return by_depth(env, (instance for split in OFFICIAL for instance in env.instances(split)))


def shaped(env: TextCraft) -> dict[int, dict[str, float]]:
    """Return the shape of the first invented worlds by depth."""
    return by_depth(env, env.instances("shaped")[:WORLDS])


def table(theirs: Mapping[int, Mapping[str, float]], ours: Mapping[int, Mapping[str, float]]) -> str:
    """Return both as a Markdown table: official / invented, a column for each depth."""
    lines = [
        "| official / invented | " + " | ".join(f"depth {depth}" for depth in theirs) + " |",
        "|---|" + "---|" * len(theirs),
    ]
    for name in theirs[1]:
        form = "{:.0f}" if name == "goals" else "{:.2f}"
        cells = (f"{form.format(theirs[depth][name])} / {form.format(ours[depth][name])}" for depth in theirs)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    world = TextCraft(expert="lazy")
    sys.stdout.write(table(official(world), shaped(world)))
