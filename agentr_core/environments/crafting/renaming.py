"""Problems with their items renamed: since no name keeps its recipe, they can only be solved by
reading.

Members of a kind of item (planks, wool) are renamed only among themselves, since commands do not
say which item is of which kind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from agentr_core.environments.crafting.planner import CraftingProblem
from agentr_core.environments.crafting.recipes import RecipeBook


def free_names(book: RecipeBook) -> list[str]:
    """Return the names that any item may get: those of items that belong to no kind that a recipe
    asks for.
    """
    kinds = {i.name for recipe in book.recipes for i in recipe.inputs if i.is_tag}
    return sorted(item for item in book.items if book.item_to_tag.get(item) not in kinds)


def rename(problem: CraftingProblem, names: Sequence[str], rng: random.Random) -> CraftingProblem:
    """Return the problem with its items renamed at random and its commands shuffled."""
    items = dict.fromkeys(i for r in problem.commands for i in (r.output, *(x.name for x in r.inputs if not x.is_tag)))
    tagged = problem.item_to_tag
    used_tags = {i.name for r in problem.commands for i in r.inputs if i.is_tag}
    mapping: dict[str, str] = {}
    for tag in sorted(used_tags):
        members = sorted(item for item, of in tagged.items() if of == tag)
        mapping.update(zip(members, rng.sample(members, len(members)), strict=True))
    free = [item for item in items if item not in mapping]
    mapping.update(zip(free, rng.sample(names, len(free)), strict=True))
    commands = [
        replace(
            recipe,
            output=mapping[recipe.output],
            output_tag=recipe.output_tag if recipe.output_tag in used_tags else None,
            inputs=tuple(i if i.is_tag else replace(i, name=mapping[i.name]) for i in recipe.inputs),
        )
        for recipe in problem.commands
    ]
    rng.shuffle(commands)
    return CraftingProblem(
        goal=mapping[problem.goal],
        commands=tuple(commands),
        item_to_tag={item: tag for item, tag in tagged.items() if tag in used_tags},
    )
