"""Mistakes as an agent makes them: a command misread and acted upon, or an action out of place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from agentr_core.environments.crafting import text
from agentr_core.environments.crafting.planner import CraftingProblem, Inventory, Plan, chain, with_recipe

_SLIP_SHARE = 0.7


def misread(problem: CraftingProblem, right: Plan, inventory: Inventory, rng: random.Random) -> Plan | None:
    """Return the plan of an agent that takes one ingredient of a command from another line; None if
    there is no such plan.

    The command is one that the next action depends on. Most often that line also lists the
    preceding ingredient of the command.
    """
    recipe = rng.choice(chain(problem, inventory, right)).recipe
    position = rng.randrange(len(recipe.inputs))
    others = [other for other in problem.commands if other.output != recipe.output]
    slips = [
        after
        for other in others
        for before, after in zip(other.inputs, other.inputs[1:], strict=False)
        if position and before == recipe.inputs[position - 1]
    ]
    choices = slips if slips and rng.random() < _SLIP_SHARE else [i for other in others for i in other.inputs]
    choices = [ingredient for ingredient in choices if ingredient not in recipe.inputs]
    if not choices:
        return None
    inputs = (*recipe.inputs[:position], rng.choice(choices), *recipe.inputs[position + 1 :])
    return with_recipe(problem, right, replace(recipe, inputs=inputs))


def corrupt(problem: CraftingProblem, present: Plan, expected: str, done: Sequence[str], rng: random.Random) -> str:
    """Return the action of a confused agent in place of the expected one, after the actions done so
    far.
    """
    kind = rng.randrange(6)
    recipe = rng.choice(problem.commands)
    item = rng.choice(recipe.inputs).name
    if kind == 0:
        return "inventory"
    if kind == 1 and done:
        return rng.choice(done)
    if kind == 2:
        return text.command(recipe)
    if kind == 3:
        return f"get {rng.randint(1, 9)} {text.display(item)}"
    words = expected.split()
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    if kind == 4 and numbers:
        spot = rng.choice(numbers)
        words[spot] = str(max(1, int(words[spot]) + rng.choice((-2, -1, 1, 2))))
        return " ".join(words)
    wanted = rng.choice([*present.recipes] or [problem.goal])
    return text.command(present.recipes[wanted]) if wanted in present.recipes else f"get 1 {text.display(problem.goal)}"
