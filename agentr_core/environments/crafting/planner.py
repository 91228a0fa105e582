"""Crafting problems and their planner: what a goal needs, what is lacking, which action is next.

Everything here is a pure function of a `CraftingProblem` and an inventory (item id -> count, no
zero entries).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from agentr_core.environments.crafting.recipes import Ingredient, Recipe

Inventory = Mapping[str, int]
MAX_CHOICES = 256
"""The most combinations of alternative recipes that the planner compares; official goals have at
most 64.
"""


@dataclass(frozen=True, kw_only=True)
class CraftingProblem:
    """A goal and the commands that are listed for it, in listed order.

    `item_to_tag` says which generic ingredient an item can stand for.
    """

    goal: str
    commands: tuple[Recipe, ...]
    item_to_tag: Mapping[str, str]

    @cached_property
    def recipes(self) -> dict[str, tuple[Recipe, ...]]:
        """The listed recipes of each item, in listed order."""
        found: dict[str, list[Recipe]] = {}
        for recipe in self.commands:
            found.setdefault(recipe.output, []).append(recipe)
        return {item: tuple(recipes) for item, recipes in found.items()}

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The craftable items that satisfy each tag, in listed order."""
        found: dict[str, dict[str, None]] = {}
        for recipe in self.commands:
            if tag := self.item_to_tag.get(recipe.output):
                found.setdefault(tag, {})[recipe.output] = None
        return {tag: tuple(items) for tag, items in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cheapest way from an inventory to the goal: what to get, how often to craft what, and by
    which recipes.

    `recipes` maps an item to its recipe, `items` a generic ingredient to the item that stands for
    it. `steps` counts actions: one for each item to get, one for each craft.
    """

    gets: Mapping[str, int]
    crafts: Mapping[str, int]
    recipes: Mapping[str, Recipe]
    items: Mapping[str, str]

    @property
    def steps(self) -> int:
        """The number of actions in the plan."""
        return len(self.gets) + sum(self.crafts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One link of the chain from the goal to the next action: an item, its recipe, and the
    ingredient of it that is lacking.
    """

    item: str
    recipe: Recipe
    lacking: tuple[str, int] | None


def plan(problem: CraftingProblem, inventory: Inventory) -> Plan | None:
    """Return the plan with the fewest steps, the first in listed order among equals; None when the
    goal is out of reach.
    """
    best: Plan | None = None
    for recipes, items in itertools.islice(_choices(problem, inventory), MAX_CHOICES):
        candidate = _expand(problem, inventory, recipes, items)
        if candidate is not None and (best is None or candidate.steps < best.steps):
            best = candidate
    return best


def chain(problem: CraftingProblem, inventory: Inventory, chosen: Plan) -> tuple[Hop, ...]:
    """Return the links from the goal to the next action of the lazy expert, following the recipes
    of a plan.

    The lazy expert satisfies the first lacking ingredient of a recipe before the next one, and
    fetches only what the next craft needs. The last hop either lacks an item to get, or lacks
    nothing and is the craft to make.
    """
    hops: list[Hop] = []
    item = problem.goal
    while True:
        recipe = chosen.recipes[item]
        lacking = None
        for ingredient in recipe.inputs:
            name = chosen.items.get(ingredient.name, ingredient.name) if ingredient.is_tag else ingredient.name
            missing = ingredient.count - inventory.get(name, 0)
            if missing > 0:
                lacking = (name, missing)
                break
        hops.append(Hop(item=item, recipe=recipe, lacking=lacking))
        if lacking is None or lacking[0] not in chosen.recipes:
            return tuple(hops)
        item = lacking[0]


def with_recipe(problem: CraftingProblem, chosen: Plan, recipe: Recipe) -> Plan | None:
    """Return the plan, changed to make the recipe's item by that recipe, listed or not; None if
    that would be circular.
    """
    recipes = {**chosen.recipes, recipe.output: recipe}
    if _topological(problem.goal, recipes, chosen.items) is None:
        return None
    return replace(chosen, recipes=recipes)


def brings_nearer(problem: CraftingProblem, before: Inventory, after: Inventory) -> bool:
    """Return whether some way to the goal, even if not the shortest, takes fewer steps after than
    before.
    """
    for recipes, items in itertools.islice(_choices(problem, after), MAX_CHOICES):
        left = _expand(problem, after, recipes, items)
        had = _expand(problem, before, recipes, items)
        if left is not None and had is not None and left.steps < had.steps:
            return True
    return False


def ingredients(recipe: Recipe, items: Mapping[str, str]) -> tuple[Ingredient, ...]:
    """Return the inputs of a recipe with generic ingredients replaced by the items that stand for
    them.
    """
    return tuple(Ingredient(name=items[i.name], count=i.count, is_tag=False) if i.is_tag else i for i in recipe.inputs)


def _choices(problem: CraftingProblem, inventory: Inventory) -> Iterator[tuple[dict[str, Recipe], dict[str, str]]]:
    """Yield every sensible choice of recipes and of items for tags.

    Members of a tag differ only in their names, so only the first one listed, those at hand, and
    those whose ingredients are at hand are tried.
    """
    tags = {i.name for r in problem.commands for i in r.inputs if i.is_tag}
    tag_options = {}
    for tag in sorted(tags):
        held = [item for item in sorted(inventory) if problem.item_to_tag.get(item) == tag]
        listed = problem.members.get(tag, ())
        near = [m for m in listed if any(i.name in inventory for r in problem.recipes[m] for i in r.inputs)]
        tag_options[tag] = tuple(dict.fromkeys([*held, *near, *listed[:1]])) or (tag,)
    reachable = _reachable(problem, tag_options)
    recipe_options = {item: problem.recipes[item] for item in problem.recipes if item in reachable}
    names = [*tag_options, *recipe_options]
    for combination in itertools.product(*tag_options.values(), *recipe_options.values()):
        chosen = dict(zip(names, combination, strict=True))
        yield (
            {item: chosen[item] for item in recipe_options},  # type: ignore[misc]
            {tag: chosen[tag] for tag in tag_options},  # type: ignore[misc]
        )


def _reachable(problem: CraftingProblem, tag_options: Mapping[str, tuple[str, ...]]) -> set[str]:
    found: set[str] = set()
    frontier = [problem.goal]
    while frontier:
        item = frontier.pop()
        if item in found:
            continue
        found.add(item)
        for recipe in problem.recipes.get(item, ()):
            for ingredient in recipe.inputs:
                frontier.extend(tag_options[ingredient.name] if ingredient.is_tag else (ingredient.name,))
    return found


def _expand(
    problem: CraftingProblem, inventory: Inventory, recipes: Mapping[str, Recipe], items: Mapping[str, str]
) -> Plan | None:
    order = _topological(problem.goal, recipes, items)
    if order is None:
        return None
    need = {problem.goal: inventory.get(problem.goal, 0) + 1}
    gets: dict[str, int] = {}
    crafts: dict[str, int] = {}
    for item in order:
        missing = need.get(item, 0) - inventory.get(item, 0)
        if missing <= 0:
            continue
        recipe = recipes.get(item)
        if recipe is None:
            gets[item] = missing
            continue
        times = -(-missing // recipe.count)
        crafts[item] = times
        for ingredient in ingredients(recipe, items):
            need[ingredient.name] = need.get(ingredient.name, 0) + times * ingredient.count
    return Plan(gets=gets, crafts=crafts, recipes=recipes, items=items)


def _topological(goal: str, recipes: Mapping[str, Recipe], items: Mapping[str, str]) -> list[str] | None:
    """Return the items the goal is made of, each before its own ingredients; None when the choice
    is circular.
    """
    order: list[str] = []
    state: dict[str, bool] = {}

    def visit(item: str) -> bool:
        if item in state:
            return state[item]
        state[item] = False
        if item in recipes and not all(visit(i.name) for i in ingredients(recipes[item], items)):
            return False
        state[item] = True
        order.append(item)
        return True

    return order[::-1] if visit(goal) else None
