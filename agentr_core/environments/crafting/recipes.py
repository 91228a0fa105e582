"""The recipes of a crafting world as an acyclic graph, and the files that they are read from.

Names are ids with their namespace, as in `minecraft:oak_planks`. A tag names a set of items, any of
which can be used where a recipe asks for the tag.

Source: TextCraft, ADaPT (arXiv 2311.05772) as served by AgentGym (arXiv 2406.04151).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFault, DataFileError
from agentr_core.system import data_path
from agentr_core.texts import path_for_message

NAMESPACE = "minecraft"
RECIPES_FILE, SPLIT_FILE = ("textcraft", "recipes.json"), ("textcraft", "split.json")
"""The shipped files, by their places in the data folder."""
SHAPED_TYPE = "minecraft:crafting_shaped"
SHAPELESS_TYPE = "minecraft:crafting_shapeless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredient:
    """`count` pieces of an item, or of any items with a tag if `is_tag`."""

    name: str
    count: int
    is_tag: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to make `count` pieces of `output`. `output_tag` is the recipe's group, or None."""

    output: str
    count: int
    output_tag: str | None
    inputs: tuple[Ingredient, ...]


@dataclass(frozen=True, kw_only=True)
class RecipeBook:
    """Recipes in load order, with lookup tables.

    `recipes_by_item` and `recipes_by_tag` map an item or a tag to the recipes that make it, and
    `item_to_tag` an item to its tag. `items` has every item of the world, craftable or not, and no
    tags.
    """

    recipes: tuple[Recipe, ...]
    recipes_by_item: Mapping[str, tuple[Recipe, ...]]
    recipes_by_tag: Mapping[str, tuple[Recipe, ...]]
    item_to_tag: Mapping[str, str]
    items: frozenset[str]
    tags: frozenset[str]

    def depth(self, name: str) -> int:
        """Return the depth of an item or tag: 0 without a recipe; otherwise one more than the depth
        of its deepest ingredient, for the recipe where that is smallest.

        Raises `DataFault` if the recipes form a cycle.
        """
        return self._depths.get(name, 0)

    def members(self, tag: str) -> tuple[str, ...]:
        """Return the items that satisfy a tag, in load order."""
        return tuple(item for item, item_tag in self.item_to_tag.items() if item_tag == tag)

    @cached_property
    def goals(self) -> tuple[tuple[str, int], ...]:
        """Every item of depth 1 or more with its depth, sorted by depth, then in load order."""
        goals = ((item, depth) for item in self.recipes_by_item if (depth := self.depth(item)))
        return tuple(sorted(goals, key=lambda goal: goal[1]))

    @cached_property
    def recipes_by_ingredient(self) -> Mapping[str, tuple[Recipe, ...]]:
        """The recipes that take an item or tag as an input, in load order, by its name."""
        return _grouped_by_key((ingredient.name, recipe) for recipe in self.recipes for ingredient in recipe.inputs)

    @cached_property
    def recipes_by_ingredient_twice(self) -> Mapping[str, tuple[Recipe, ...]]:
        """The same recipes, ordered by output, and after these the ones with a group a second time,
        ordered by group.
        """
        recipes_by_group = _grouped_by_key(
            (recipe.output_tag, recipe) for recipe in self.recipes if recipe.output_tag is not None
        )
        recipes = itertools.chain.from_iterable((*self.recipes_by_item.values(), *recipes_by_group.values()))
        return _grouped_by_key((ingredient.name, recipe) for recipe in recipes for ingredient in recipe.inputs)

    @cached_property
    def _depths(self) -> dict[str, int]:
        # Recipes by item take precedence: an item hides a tag of the same name.
        recipes_by_name = {**self.recipes_by_tag, **self.recipes_by_item}
        ingredients_by_name = {
            name: {i.name for recipe in recipes for i in recipe.inputs} for name, recipes in recipes_by_name.items()
        }
        depths: dict[str, int] = {}
        try:
            for name in TopologicalSorter(ingredients_by_name).static_order():
                recipe_depths = (
                    max((depths[i.name] + 1 for i in r.inputs), default=0) for r in recipes_by_name.get(name, ())
                )
                depths[name] = min(recipe_depths, default=0)
        except CycleError as error:
            raise DataFault(f"recipes form a cycle: {' <- '.join(error.args[1])}") from None
        return depths


def build_book(
    recipes: Iterable[Recipe], *, item_to_tag: Mapping[str, str] | None = None, items: Iterable[str] = ()
) -> RecipeBook:
    """Return a book of the given recipes. They are unchanged, except that an input tag that no item
    satisfies becomes an item.

    Args:
        recipes: in load order, without cycles.
        item_to_tag: the tag of each item; by default the last group among its own recipes.
        items: items of the world that no recipe names.
    """
    all_recipes = tuple(recipes)
    if item_to_tag is None:
        item_to_tag = {r.output: r.output_tag for r in all_recipes if r.output_tag and r.output_tag != r.output}
    tags = frozenset(item_to_tag.values())
    book_recipes = tuple(
        replace(r, inputs=tuple(replace(i, is_tag=i.is_tag and i.name in tags) for i in r.inputs)) for r in all_recipes
    )
    item_names = {i.name for r in book_recipes for i in r.inputs if not i.is_tag}
    return RecipeBook(
        recipes=book_recipes,
        recipes_by_item=_grouped_by_key((r.output, r) for r in book_recipes),
        recipes_by_tag=_grouped_by_key((r.output_tag, r) for r in book_recipes if r.output_tag in tags),
        item_to_tag=item_to_tag,
        items=frozenset({*(r.output for r in book_recipes), *item_names, *items}),
        tags=tags,
    )


def acyclic_recipes(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return an acyclic selection of the recipes, in load order.

    A recipe is left out if its only ingredient is a storage block, or if it would close a cycle
    with earlier recipes.
    """
    ingredients_by_name: dict[str, set[str]] = {}
    acyclic = []
    for recipe in recipes:
        inputs = {ingredient.name for ingredient in recipe.inputs}
        if len(inputs) == 1 and next(iter(inputs)).endswith("_block"):
            continue
        outputs = {recipe.output, recipe.output_tag or recipe.output}
        # The inputs, and everything that they may be made of.
        reachable: set[str] = set()
        frontier = list(inputs)
        while frontier:
            name = frontier.pop()
            if name not in reachable:
                reachable.add(name)
                frontier.extend(ingredients_by_name.get(name, ()))
        if outputs & reachable:
            continue
        ingredients_by_name.setdefault(recipe.output, set()).update(inputs)
        for tag in outputs - {recipe.output}:
            ingredients_by_name.setdefault(tag, set()).add(recipe.output)
        acyclic.append(recipe)
    return acyclic


def load_shipped() -> RecipeBook:
    """Return the shipped recipes of Minecraft 1.16, which equal the published graph. Raises
    `DataFileError` if the file is missing or malformed.
    """
    path = data_path(*RECIPES_FILE)
    rows = _read_json(path)
    try:
        # In this file, names have no namespace, and tags start with "#".
        recipes = [
            Recipe(
                output=f"{NAMESPACE}:{output}",
                count=count,
                output_tag=f"{NAMESPACE}:{group}" if group else None,
                inputs=tuple(
                    Ingredient(name=f"{NAMESPACE}:{name.removeprefix('#')}", count=number, is_tag=name.startswith("#"))
                    for name, number in inputs.items()
                ),
            )
            for output, count, group, inputs in rows
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise DataFileError(f"recipe table {path} is malformed ({error}); restore it from the release") from error
    return _official_book(recipes)


def load_folder(folder: Path) -> RecipeBook:
    """Return the recipes from a folder of the game's own JSON files, loaded in the order of file
    names.

    Files of other types than `crafting_shaped` and `crafting_shapeless` are skipped. Of an
    ingredient with several options, only the first counts.

    Raises:
        DataFileError: the folder is missing or has no crafting recipe, or a file is malformed.
    """
    if not folder.is_dir():
        raise DataFileError(
            f"recipe folder {path_for_message(folder)} does not exist; "
            "point recipes_dir to the game's recipe JSON files"
        )
    recipes = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name):
        raw = _read_json(path)
        try:
            if raw["type"] in (SHAPED_TYPE, SHAPELESS_TYPE):
                recipes.append(_recipe_from_game(raw))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else error
            raise DataFileError(f"recipe file {path} is malformed ({detail}); repair or remove it") from error
    if not recipes:
        raise DataFileError(f"recipe folder {folder} has no crafting recipe; point recipes_dir to the game's files")
    return _official_book(recipes)


def load_splits() -> dict[str, tuple[int, ...]]:
    """Return the goal indices of the splits `train`, `test` and `rest` (all others), each
    ascending.

    Raises `DataFileError` if the file is missing or malformed.
    """
    path = data_path(*SPLIT_FILE)
    raw = _read_json(path)
    try:
        train, test = (
            tuple(index for first, last in raw[name] for index in range(first, last + 1)) for name in ("train", "test")
        )
        rest = tuple(sorted(set(range(raw["goals"])).difference(train, test)))
    except (KeyError, TypeError, ValueError) as error:
        raise DataFileError(f"split file {path} is malformed ({error}); restore it from the release") from error
    return {"train": train, "test": test, "rest": rest}


def _official_book(recipes: Sequence[Recipe]) -> RecipeBook:
    # The outputs of recipes that were left out stay in the world, so that an agent can get them.
    return build_book(acyclic_recipes(recipes), items=(recipe.output for recipe in recipes))


def _grouped_by_key(pairs: Iterable[tuple[Any, Recipe]]) -> dict[str, tuple[Recipe, ...]]:
    recipes_by_key: dict[str, list[Recipe]] = {}
    for key, recipe in pairs:
        recipes_by_key.setdefault(key, []).append(recipe)
    return {key: tuple(recipes) for key, recipes in recipes_by_key.items()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataFileError(f"{path} cannot be read as JSON ({error}); repair or remove it") from error


def _recipe_from_game(raw: Mapping[str, Any]) -> Recipe:
    """Return the recipe in the content of one of the game's files."""
    counts: Counter[tuple[str, bool]] = Counter()
    if raw["type"] == SHAPED_TYPE:
        letter_counts = Counter("".join(raw["pattern"]).replace(" ", ""))
        unknown = sorted(letter_counts.keys() - raw["key"].keys())
        if unknown:
            raise ValueError(f"the pattern has {unknown[0]!r}, the key does not")
        for letter, options in raw["key"].items():
            counts[_ingredient(options)] += letter_counts[letter]
    else:
        counts.update(_ingredient(options) for options in raw["ingredients"])
    result = raw["result"]
    output, count = (result, 1) if isinstance(result, str) else (result["item"], result.get("count", 1))
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"the result's count is {count!r}, not a positive integer")
    return Recipe(
        output=output,
        count=count,
        output_tag=f"{NAMESPACE}:{raw['group']}" if raw.get("group") else None,
        inputs=tuple(Ingredient(name=n, is_tag=is_tag, count=count) for (n, is_tag), count in counts.items() if count),
    )


def _ingredient(options: Any) -> tuple[str, bool]:
    first = options[0] if isinstance(options, list) else options
    return (first["tag"], True) if "tag" in first else (first["item"], False)
