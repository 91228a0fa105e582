"""The commands that an instance of a crafting world lists: all that its goal may need, and up to 10
useless ones.

Source: TextCraft, ADaPT (arXiv 2311.05772) as served by AgentGym (arXiv 2406.04151).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from agentr_core.environments.crafting import text
from agentr_core.environments.crafting.recipes import Recipe, RecipeBook
from agentr_core.fingerprint import derive_seed
from agentr_core.types import Instance

Distractors = Literal["distinct", "published"]
"""How distractors are drawn. See `listed_commands`."""

MAX_DISTRACTORS = 10
_PUBLISHED_SEED = 42


def listed_commands(
    world: RecipeBook, goal: str, instance: Instance, *, distractors: Distractors = "distinct"
) -> tuple[Recipe, ...]:
    """Return the recipes that an instance lists: all that the goal may need and up to 10
    distractors, shuffled by its index.

    A distractor shares an ingredient with a needed recipe. For each ingredient of a needed recipe,
    up to 10 recipes are drawn. With `distinct`, each recipe can be drawn once. With `published`, a
    recipe that has a group is among the candidates twice, and every occurrence of a recipe in the
    tree of the goal draws again, with the fixed seed of the public code, so that as many
    distractors are left as in the published world.
    """
    needed = _needed(world, goal, frozenset())
    rng = random.Random(derive_seed("textcraft-commands", instance.split == "procedural", instance.index))
    others = _drawn_as_published(world, goal) if distractors == "published" else _drawn_once_each(world, needed, rng)
    listed = [*needed, *rng.sample(others, min(MAX_DISTRACTORS, len(others)))]
    rng.shuffle(listed)
    return tuple(listed)


def _drawn_once_each(world: RecipeBook, needed: dict[Recipe, None], rng: random.Random) -> list[Recipe]:
    drawable: dict[Recipe, None] = {}
    for recipe in needed:
        for ingredient in recipe.inputs:
            users = world.users(ingredient.name)
            drawable.update(dict.fromkeys(rng.sample(users, min(MAX_DISTRACTORS, len(users)))))
    return [recipe for recipe in drawable if recipe not in needed]


def _drawn_as_published(world: RecipeBook, goal: str) -> list[Recipe]:
    places = list(_places(world, goal, frozenset()))
    needed = {text.command(recipe) for recipe in places}
    # The public code seeds its generator anew at each reset.
    rng = random.Random(_PUBLISHED_SEED)
    drawable: dict[str, Recipe] = {}
    for recipe in places:
        for ingredient in recipe.inputs:
            users = world.users_twice(ingredient.name)
            for drawn in rng.sample(users, min(MAX_DISTRACTORS, len(users))):
                drawable.setdefault(text.command(drawn), drawn)
    return [drawable[line] for line in sorted(drawable.keys() - needed)]


def _needed(world: RecipeBook, name: str, path: frozenset[str]) -> dict[Recipe, None]:
    found: dict[Recipe, None] = {}
    if name in path:
        return found
    for recipe in _ways(world, name):
        found[recipe] = None
        for ingredient in recipe.inputs:
            found.update(_needed(world, ingredient.name, path | {name}))
    return found


def _places(world: RecipeBook, name: str, path: frozenset[str]) -> Iterator[Recipe]:
    """Yield the recipes of a name and of everything below it, each as often as it occurs; at most
    163 for an official goal.
    """
    if name in path:
        return
    yield from _ways(world, name)
    for recipe in _ways(world, name):
        for ingredient in recipe.inputs:
            yield from _places(world, ingredient.name, path | {name})


def _ways(world: RecipeBook, name: str) -> tuple[Recipe, ...]:
    return world.by_item.get(name) or world.by_tag.get(name, ())
